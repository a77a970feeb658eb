"""The scheduler: it plans which sequences compute which tokens in the next step.

Continuous batching, chunked prefill, preemption and priorities are one loop here: prefill is a
sequence with many pending tokens, decoding one with a single token.
"""

import itertools
from bisect import bisect_left, insort

import numpy as np

from penstock.worker.engine.cache.block_pool import BlockPool
from penstock.worker.engine.io.messages import BATCH_PRIORITY, BatchLoad
from penstock.worker.engine.scheduling.batch_bound import BatchBound
from penstock.worker.engine.scheduling.shares import above_share
from penstock.worker.engine.scheduling.step_time import NO_BOUND, StepTime
from penstock.worker.engine.sequences.columns import Columns, Numbers
from penstock.worker.engine.sequences.sequence import Plan, Sequence, Status


def _place(seq: Sequence) -> tuple[int, ...]:
    """Return the sequence's place in line, as a key to sort by."""
    return seq.place


def _num_above(line: list[Sequence], priority: int) -> int:
    """Return the number of sequences in a line that stand before those of a class."""
    at: tuple[int, ...] = (priority,)
    return bisect_left(line, at, key=_place)


def _within(most: int, counts: Numbers) -> Numbers:
    """Return how much of its count each gets, the first before the others, `most` together."""
    if counts.sum() <= most:
        return counts
    before = counts.cumsum() - counts
    return counts.clip(max=(most - before).clip(min=0))


class Scheduler:
    """Shares the tokens and the time of each step among the sequences.

    There are no phases of prefill and decode: each sequence has pending tokens. In line are first
    the higher classes, then in each class the earlier turn. Waiting sequences hold no blocks. A
    victim of preemption is the last in line, so the first always moves on. The victim gives all
    its blocks back, and later finds those again that were not reused meanwhile.

    The class `batch` takes what others leave. Where one of another class waits for capacity, it
    gives way. While others are served, a step computes few of its tokens, those of the first in
    line; the rest keep their blocks and stand still.

    In the other classes rows are shared among the owners of sequences: who has more of them than
    its share gives way to who waits and has less.

    step_time             bounds the prompts in a step, so that those who run wait no longer for it
    preemption_threshold  how many classes a running sequence must be below the first one that
                          waits for capacity, to give way to it; None means that only the class
                          `batch` gives way
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_threshold: int | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption_threshold = preemption_threshold
        self.waiting: list[Sequence] = []  # waiting and running: the first in line first
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_admitted_tokens = 0  # tokens of sequences at their first admission
        self.num_cached_tokens = 0  # admitted tokens in the prefix cache or a leader's blocks
        self.num_recomputed_tokens = 0  # tokens computed before, and not cached at an admission
        self._arrivals = itertools.count()
        self.columns = Columns(max_num_seqs)
        self._rows = list(range(max_num_seqs))  # unused rows of the columns
        self._line: tuple[list[Sequence], Numbers] | None = None  # running, and their rows
        self.num_forks = 0
        self._leaders: dict[str, Sequence] = {}  # group -> the one that computes its prompt
        self._is_full = False  # the first that waits found no room, and nothing was freed since
        self.batch_bound = BatchBound()
        self.step_time = step_time or StepTime()
        self._num_still = 0  # running sequences of the class batch that are not in the step

    def add(self, seq: Sequence) -> None:
        seq.place = seq.priority, seq.turn, next(self._arrivals)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_place)
        self._is_full = False

    def remove(self, seq: Sequence) -> None:
        """End the sequence wherever it is, and free its blocks at once."""
        if seq.status is Status.RUNNING:
            self._stop(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.DONE

    def schedule(self) -> Plan:
        """Plan one step, first in line first, within its tokens and its time."""
        if self.num_waiting or _num_above(self.running, BATCH_PRIORITY):
            self.batch_bound.note_others()
        batch_left = self.batch_bound.most_tokens
        self._give_way()
        (seqs, rows), starts, pending, counts = self._go_on(batch_left)
        quota = self.max_num_batched_tokens - int(counts.sum())
        num_moving = int(np.count_nonzero(counts))
        self._num_still = len(seqs) - num_moving
        if batch_left is not None:
            batch_left -= int(counts[_num_above(seqs, BATCH_PRIORITY) :].sum())
        if self._num_still:  # the last sequences found no tokens left
            seqs, rows = seqs[:num_moving], rows[:num_moving]
            starts, pending, counts = starts[:num_moving], pending[:num_moving], counts[:num_moving]
        room = self.step_time.room(starts, counts) if self.waiting else NO_BOUND
        entries = []
        while quota and room.is_open and (seq := self._admit(batch_left is None or batch_left > 0)):
            most = min(quota, int(self.columns.border[seq.row]) - seq.num_prefix)
            if batch_left is not None and seq.place[0] >= BATCH_PRIORITY:
                most = min(most, batch_left)
                batch_left -= min(most, seq.num_pending)
            count = room.take(seq.num_prefix, min(most, seq.num_pending))
            entries.append((seq, seq.row, seq.num_prefix, seq.num_pending, count))
            quota -= entries[-1][-1]
        if entries:
            new, *columns = zip(*entries, strict=True)
            seqs = [*seqs, *new]
            rows, starts, pending, counts = (
                np.append(column, more)
                for column, more in zip((rows, starts, pending, counts), columns, strict=True)
            )
        draws = counts == pending
        drawing_seqs = seqs if draws.all() else [seqs[place] for place in np.flatnonzero(draws)]
        plan = Plan(seqs, rows, starts, counts, drawing_seqs, draws)
        return self._with_forks(plan) if self._leaders else plan

    def note_step(self, num_tokens: int, pairs: float, seconds: float) -> None:
        """Note what a step took, from which the time of the next ones is predicted."""
        self.batch_bound.note_step(num_tokens, seconds)
        self.step_time.note_step(num_tokens, pairs, seconds)

    def plan_ahead(self, plan: Plan) -> tuple[Plan, Numbers | None] | None:
        """Plan the step after `plan`, whose tokens are not known yet.

        Each sequence computes the token that it draws now. Those that end with it by their length
        are left out: the second value is the places of the others, None if these are all. Return
        None where `schedule` might choose another step: a prompt is being read, one that waits
        might start, blocks are short, or a search has not said which beams go on.
        """
        columns, could_start = self.columns, self.waiting and not self._is_full
        everyone_draws = len(plan.drawing_seqs) == len(plan) == len(self.running) - self._num_still
        if could_start or not everyone_draws or self._gives_way():
            return None
        if columns.is_beam[plan.rows].any():
            return None
        goes_on = plan.starts + plan.counts + 1 < columns.longest[plan.rows]
        places = None if goes_on.all() else np.flatnonzero(goes_on)
        if places is not None and self._num_still:
            return None
        after = plan if places is None else plan.only(places)
        if not len(after):
            return None
        starts, rows = after.starts + after.counts, after.rows
        is_short = starts + 1 > columns.num_blocks[rows] * self.pool.block_size
        for place in np.flatnonzero(is_short).tolist():
            seq = after.seqs[place]
            if not self.pool.reserve(seq, int(starts[place]) + 1):
                return None
            columns.num_blocks[seq.row] = len(seq.block_table)
        counts = np.ones_like(starts)
        return Plan(after.seqs, rows, starts, counts, after.drawing_seqs, after.draws), places

    def _go_on(
        self, most_batch: int | None
    ) -> tuple[tuple[list[Sequence], Numbers], Numbers, Numbers, Numbers]:
        """Return the running sequences with their rows, and three columns of counts.

        The columns are each sequence's computed tokens, its pending tokens, and how many of the
        pending ones this step computes. The blocks for these are reserved, if need be by
        preemption.

        most_batch  the number of tokens of the class `batch` in the step; None: as many as fit
        """
        while True:
            seqs, rows = line = self._in_line()
            starts = self.columns.num_computed[rows]
            counts = pending = self.columns.num_tokens[rows] - starts
            if self.pool.states is not None:
                counts = np.minimum(pending, self.columns.border[rows] - starts)
            if most_batch is not None:
                other_counts, batch_counts = np.split(counts, [_num_above(seqs, BATCH_PRIORITY)])
                counts = np.append(other_counts, _within(most_batch, batch_counts))
            counts = self.step_time.within(starts, _within(self.max_num_batched_tokens, counts))
            ends = starts + counts
            is_short = ends > self.columns.num_blocks[rows] * self.pool.block_size
            num_preemptions = self.num_preemptions
            for place in np.flatnonzero(is_short).tolist():
                seq = seqs[place]
                if seq.status is not Status.RUNNING:  # preempted by this loop, for one before it
                    break
                self._make_room(seq, int(ends[place]))
            if self.num_preemptions == num_preemptions:
                return line, starts, pending, counts

    def keep_states(self, plan: Plan, spoilt_places: list[int]) -> None:
        """Keep the states of sequences that the plan took to a border, but for the spoilt ones."""
        columns, ends = self.columns, plan.starts + plan.counts
        for place in np.flatnonzero(ends == columns.border[plan.rows]).tolist():
            if place not in spoilt_places:
                self.pool.keep_state(plan.seqs[place])
                columns.note_border(plan.seqs[place])

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting sequences of other classes than `batch`."""
        return _num_above(self.waiting, BATCH_PRIORITY)

    def batch_load(self) -> BatchLoad:
        (seqs, rows), bound = self._in_line(), self.batch_bound.most_tokens
        of_batch = rows[_num_above(seqs, BATCH_PRIORITY) :]
        return BatchLoad(
            int(self.columns.num_blocks[of_batch].sum()),
            len(self.waiting) - self.num_waiting,
            # One more, so that it need not be fetched when another ends.
            len(self.columns.stay) if bound is None else bound + 1,
        )

    def num_live_slots(self) -> int:
        """Return the number of KV slots in use, with a shared slot counted once.

        They are the slots of the held blocks, less the empty ones at the sequences' ends.
        """
        (_, rows), columns, block_size = self._in_line(), self.columns, self.pool.block_size
        empty = columns.num_blocks[rows] * block_size - columns.num_computed[rows]
        return self.pool.num_held * block_size - int(empty.sum())

    def _in_line(self) -> tuple[list[Sequence], Numbers]:
        if self._line is None:
            rows = np.array([seq.row for seq in self.running], np.int64)
            self._line = list(self.running), rows
        return self._line

    def _make_room(self, seq: Sequence, num_tokens: int) -> None:
        """Reserve the sequence's next blocks; preempt those behind it, or else itself, for them."""
        while not self.pool.reserve(seq, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return
        self.columns.num_blocks[seq.row] = len(seq.block_table)

    def _gives_way(self) -> bool:
        """Return whether a running sequence might give way to one that waits."""
        is_below = bool(self.waiting) and self._num_staying() < len(self.running)
        return is_below or self._due_share() is not None

    def _give_way(self) -> None:
        """Preempt running sequences for one of a higher class, or of an owner below its share."""
        self._give_way_to_class()
        if due := self._due_share():
            self._give_share(*due)

    def _give_share(self, seq: Sequence, victims: list[Sequence]) -> None:
        """Preempt the victims for a sequence, which stands before them in line from now on.

        They keep their places, so the first of an owner's always moves on.
        """
        first = min(peer.place for peer in (self.waiting[0], *victims))
        if first < seq.place:
            self.waiting.remove(seq)
            seq.place = *first[:2], -next(self._arrivals)
            insort(self.waiting, seq, key=_place)
        for victim in victims:
            self._preempt(victim)

    def _due_share(self) -> tuple[Sequence, list[Sequence]] | None:
        """Return the first that waits for a row of its owner's share, and who gives way to it.

        It is of the class that is first in line, and those who give way are of that or a lower one.
        Return None where what they hold is not enough, or nobody need give way.
        """
        priority = self.waiting[0].place[0] if self.waiting else BATCH_PRIORITY
        if priority >= BATCH_PRIORITY:
            return None
        below, owners = self.running[_num_above(self.running, priority) :], set[str]()
        for seq in self.waiting[: _num_above(self.waiting, priority + 1)]:
            if seq.owner in owners or self._is_led(seq) or self.pool.awaits(seq):
                continue
            owners.add(seq.owner)
            above = above_share(seq, below)
            victims = self._enough(seq, above) if above else None
            if victims or (victims is not None and seq is not self.waiting[0]):
                return seq, victims
        return None

    def _enough(self, seq: Sequence, victims: list[Sequence]) -> list[Sequence] | None:
        """Return the first of `victims` whose blocks and rows are enough for it, or None."""
        num_needed, num_unheld = self.pool.num_needed(seq, len(seq.token_ids)), self.pool.num_unheld
        has_row = bool(self._rows)
        for count, victim in enumerate(victims):
            if has_row and num_unheld >= num_needed:
                return victims[:count]
            has_row, num_unheld = True, num_unheld + self.pool.num_own(victim)
        return victims if has_row and num_unheld >= num_needed else None

    def _give_way_to_class(self) -> None:
        """Preempt sequences for the first in line, if those far enough below its class hold enough.

        A sequence that gave way stands right behind the one that it gave way to, and gives way no
        more, so a flood of a higher class starves nobody. Those of the class `batch` keep their
        place: they run in what others leave.
        """
        if not self.waiting:
            return
        first = self.waiting[0]
        below = self.running[self._num_staying() :]
        if not below:
            return
        num_needed = self.pool.num_needed(first, len(first.token_ids))
        num_held = sum(len(seq.block_table) for seq in below)
        if self.pool.awaits(first) or self.pool.num_unheld + num_held < num_needed:
            return
        while below and (not self._rows or self.pool.num_unheld < num_needed):
            victim = below.pop()
            if victim.place[0] < BATCH_PRIORITY:
                victim.place = *first.place, *victim.place
            self._preempt(victim)

    def _num_staying(self) -> int:
        """Return the number of running sequences that do not give way to the first that waits."""
        priority = self.waiting[0].priority
        if priority >= BATCH_PRIORITY:
            return len(self.running)
        threshold = self.preemption_threshold or BATCH_PRIORITY
        return _num_above(self.running, min(BATCH_PRIORITY, priority + threshold))

    def _preempt(self, seq: Sequence) -> None:
        seq.num_before = int(self.columns.num_computed[seq.row])
        seq.num_preemptions += 1
        self._stop(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_place)
        self.num_preemptions += 1

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._line = None
        self._is_full = False
        self._rows.append(seq.row)
        self.pool.release(seq)

    def _admit(self, batch_too: bool) -> Sequence | None:
        """Start the first in line that computes nothing twice, if all its tokens have blocks.

        Blocks are needed for the whole sequence, not only for its first slice: one that is admitted
        on the last free block is preempted a step later. A sequence without enough blocks is not
        overtaken, so nobody starves, and a victim never comes back on the blocks that it just lost.
        Return None where no sequence can start.
        """
        if not self._rows:
            self._is_full = True
            return None
        for place, seq in enumerate(self.waiting):
            if not batch_too and seq.place[0] >= BATCH_PRIORITY:
                self._is_full = seq is self.waiting[0]
                return None
            if self._is_led(seq) or self.pool.awaits(seq) or not self.pool.attach(seq):
                continue
            if not self.pool.reserve(seq, len(seq.token_ids)):
                self.pool.release(seq)
                # One before it may only wait for a prefix, which the running step computes.
                self._is_full = place == 0
                return None
            del self.waiting[place]
            if seq.group and not seq.num_completion:
                self._leaders[seq.group] = seq
            if seq.num_cached is None:
                seq.num_cached = min(seq.num_prefix, seq.num_prompt)
                self.num_admitted_tokens += len(seq.token_ids)
                self.num_cached_tokens += seq.num_prefix
            self.num_recomputed_tokens += max(0, seq.num_before - seq.num_prefix)
            self._enter(seq)
            self.pool.restore_state(seq)
            return seq
        return None

    def _enter(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        seq.row = self._rows.pop()
        insort(self.running, seq, key=_place)
        self._line = None
        self.columns.enter(seq)

    def _is_led(self, seq: Sequence) -> bool:
        """Return whether a running sequence computes the prompt of this one."""
        leader = self._leaders.get(seq.group)
        return leader is not None and leader.status is Status.RUNNING and not leader.num_completion

    def _with_forks(self, plan: Plan) -> Plan:
        """Return the plan with forks behind each sequence that reaches its prompt's end in it.

        They are the others of its group, as many as find a row and a block for their last one. Who
        finds none is admitted later, as any other.
        """
        forks: dict[int, list[Sequence]] = {}
        copies: list[tuple[int, int]] = []
        for group, leader in [*self._leaders.items()]:
            if leader.status is Status.RUNNING and leader not in plan.drawing_seqs:
                continue  # its prompt takes more steps
            del self._leaders[group]
            if leader.status is not Status.RUNNING or leader.num_completion:
                continue
            followers = forks[plan.seqs.index(leader)] = []
            for seq in [member for member in self.waiting if member.group == group]:
                pairs = None if seq.num_completion else self._fork(seq, leader)
                if pairs is None:
                    break
                copies += pairs
                followers.append(seq)
        return plan.with_forks(forks, copies) if any(forks.values()) else plan

    def _fork(self, seq: Sequence, leader: Sequence) -> list[tuple[int, int]] | None:
        """Let the sequence go on from its leader's prompt; return the blocks to be copied."""
        copies = self.pool.fork(seq, leader, seq.num_prompt) if self._rows else None
        if copies is None:
            return None
        self.waiting.remove(seq)
        if seq.num_cached is None:
            seq.num_cached = seq.num_prompt
            self.num_admitted_tokens += seq.num_prompt
            self.num_cached_tokens += seq.num_prompt
        self.num_forks += 1
        self._enter(seq)
        return copies

    def branch(self, seq: Sequence, beam: Sequence) -> list[tuple[int, int]]:
        """Start a sequence that is a beam with another token; return the blocks to be copied.

        The beam has no new token yet. A sequence without a row or blocks waits, as any other.
        """
        num_tokens = len(beam.token_ids)
        seq.num_cached, seq.num_before = beam.num_cached, num_tokens
        seq.digests = [*beam.digests]
        is_running = beam.status is Status.RUNNING and self._rows
        copies = self.pool.fork(seq, beam, num_tokens) if is_running else None
        if copies is None:
            self.add(seq)
            return []
        seq.place = beam.place
        self.num_forks += 1
        self._enter(seq)
        return copies
