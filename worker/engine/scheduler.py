"""Who computes what in the next step."""

import itertools
from bisect import insort

from worker.engine.block_pool import BlockPool
from worker.engine.sequence import Sequence, Slice, Status


def _place(seq: Sequence) -> tuple[int, ...]:
    """Who comes first, runs first."""
    return seq.place


class Scheduler:
    """No phases: each sequence has pending tokens, and a step shares out one token budget.

    In line are first the higher classes, then in each the earlier turn. Waiting sequences hold no
    blocks. A victim of preemption is the last in line, so the first always moves on; it gives all
    its blocks back, and what of them was not reused meanwhile is found again.

    preemption_threshold  classes that a running sequence must be below the first that waits for
                          room, to give way to it; none: nobody gives way
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_threshold: int | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption_threshold = preemption_threshold
        self.waiting: list[Sequence] = []  # both in order, the first in line first
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_admitted_tokens = 0  # given at first admissions
        self.num_cached_tokens = 0  # of those, found computed
        self._arrivals = itertools.count()
        self._rows = list(range(max_num_seqs))  # unused rows of the persistent batch

    def add(self, seq: Sequence) -> None:
        seq.place = seq.priority, seq.turn, next(self._arrivals)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """End the sequence wherever it is, and free its blocks at once."""
        if seq.status is Status.RUNNING:
            self._stop(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    def schedule(self) -> list[Slice]:
        """Plan one step, first in line first, under one token budget."""
        self._give_way()
        budget, plan = self.max_num_batched_tokens, []
        block_size, running = self.pool.block_size, Status.RUNNING
        for seq in list(self.running):
            if not budget:
                break
            if seq.status is not running:  # preempted a moment ago, for one before it
                continue
            pending = len(seq.token_ids) - seq.num_computed
            count = pending if pending < budget else budget
            room = len(seq.block_table) * block_size - seq.num_computed
            if count <= room or self._make_room(seq, count):
                plan.append(Slice(seq, count, count == pending))
                budget -= count
        while budget and (admitted := self._admit()):
            count = min(admitted.num_pending, budget)
            plan.append(Slice(admitted, count, count == admitted.num_pending))
            budget -= count
        return plan

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Reserve the sequence's next blocks, at the cost of those behind it, or of itself."""
        while not self.pool.reserve(seq, seq.num_computed + count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _give_way(self) -> None:
        """Make room for the first in line, if those far enough below its class hold enough of it.

        Who gave way stands right behind whom it gave way to, and gives way no more, so a flood of
        a higher class starves nobody.
        """
        if self.preemption_threshold is None or not self.waiting:
            return
        first = self.waiting[0]
        least = first.priority + self.preemption_threshold
        below = [seq for seq in self.running if seq.place[0] >= least]
        needed = self.pool.num_needed(first, len(first.token_ids))
        held = sum(len(seq.block_table) for seq in below)
        if self.pool.awaits(first) or self.pool.num_unheld + held < needed:
            return
        while below and (not self._rows or self.pool.num_unheld < needed):
            victim = below.pop()
            victim.place = *first.place, *victim.place
            self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_place)
        self.num_preemptions += 1

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._rows.append(seq.row)
        self.pool.release(seq)

    def _admit(self) -> Sequence | None:
        """Start the first in line that computes nothing twice, if all its pending tokens have room.

        Room for the whole of it, not for its first slice: what is admitted on the last free block
        is preempted a step later. Whoever lacks room is not overtaken, so nobody starves, and a
        victim never comes back on the blocks that it just lost.
        """
        if not self._rows:
            return None
        for place, seq in enumerate(self.waiting):
            if self.pool.awaits(seq) or not self.pool.attach(seq):
                continue
            if not self.pool.reserve(seq, len(seq.token_ids)):
                self.pool.release(seq)
                return None
            del self.waiting[place]
            seq.status = Status.RUNNING
            seq.row = self._rows.pop()
            if seq.num_cached is None:
                seq.num_cached = min(seq.num_computed, seq.num_prompt)
                self.num_admitted_tokens += len(seq.token_ids)
                self.num_cached_tokens += seq.num_computed
            insort(self.running, seq, key=_place)
            return seq
        return None
