"""Backpressure: the number of jobs that the engine can take now.

A worker reads no more than that, so that no job waits here which another worker could run.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.schemas.delivery import HeldRows
from penstock.schemas.job import COMPLETION_TOKENS, QueueClass
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import BATCH_PRIORITY, AddSequence, Load
from penstock.worker.process.ipc import Step

_WEIGHT = 0.1  # weight of the newest sequence in the average
_MOST_TEXTS = 16  # jobs of a read for which there need be no room
_CLASSES: tuple[tuple[int, QueueClass], ...] = ((1, "normal"), (0, "high"))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The number of jobs to read.

    With `down_to` there is no room: one job is read, of that priority class or a higher one, and
    running sequences give way to it. Jobs of the class `text` need no room.

    batch      how many of them may be of the class `batch`; None: all
    held_rows  by class: if nothing else is read, one job is of a tenant below its share, to which a
               running sequence of another gives way
    """

    count: int
    down_to: QueueClass | None = None
    batch: int | None = None
    held_rows: Mapping[QueueClass, HeldRows] = field(default_factory=dict)


class Capacity:
    """The free sequences and KV blocks that the engine last reported, less what is on its way.

    There is one reader a lane. Each asks for its lane's share at most, so none of them is left out
    for another. Where an engine's sequences of the class `batch` give way, what they have is free
    for others.

    threshold   the engine's preemption threshold: how many classes a sequence must be below
                another one to give way to it
    is_settled  returns whether the engine has carried out all that it was told
    """

    def __init__(
        self,
        limits: EngineLimits,
        num_lanes: int,
        threshold: int | None = None,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limits = limits
        self._num_lanes = num_lanes
        self._threshold = threshold
        self._is_settled = is_settled
        self._sequences: dict[str, AddSequence] = {}  # in the engine, by their ids
        self._new_blocks: dict[str, float] = {}  # the same, with no token yet -> its blocks
        self._num_batch = 0  # sequences of the class batch
        self._num_expected = 0  # jobs that reads under way may yet bring
        self._num_expected_batch = 0  # how many of these may be of the class batch
        self._num_preparing = 0  # jobs read whose sequences have not entered
        self._num_preparing_batch = 0  # the same, of the class batch
        self._average_blocks = self._blocks(COMPLETION_TOKENS)
        self._load = Load()
        self._step_s = 0.0
        self._trial: str | None = None  # the suspect that runs alone
        self._reader: object | None = None  # the only one that may read
        self._change = asyncio.Event()

    async def wait(self, reader: object) -> ReadRequest:
        """Wait for room and return what to read, at least one job.

        The room is kept until `note_read`.
        """
        while not (self._reader in (None, reader) and (ask := self._ask())):
            self._change.clear()
            await self._change.wait()
        self._num_expected += ask.count
        self._num_expected_batch += ask.batch or 0
        return ask

    async def until_free(self, most_s: float, or_preempts: bool = False) -> None:
        """Return once there is room, or after `most_s` seconds.

        or_preempts  or once running sequences would give way to a job
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not (self.free() or (or_preempts and self._preempts_for())):
                    self._change.clear()
                    await self._change.wait()

    async def until_settled(self) -> None:
        """Return once the engine has carried out all that it was told; it may hang for ever."""
        while not self._is_settled():
            self._change.clear()
            await self._change.wait()

    @property
    def is_used(self) -> bool:
        """Return whether any job is prepared or in work, or may still be in the engine."""
        return bool(self._sequences or self._num_preparing) or not self._is_settled()

    @property
    def step_us(self) -> int:
        """Return the microseconds that a step takes of late, or 0 before the first step."""
        return round(self._step_s * 1e6)

    def admits(self, job_id: str, is_suspect: bool) -> bool:
        """Return whether a job that was just read may start.

        A suspect starts only where nothing else runs, and nothing starts beside it.
        """
        is_alone = not self._sequences and self._num_preparing == 1 and self._is_settled()
        if is_suspect and is_alone:
            self._trial = job_id
            return True
        return not is_suspect and self._trial is None

    def end_trial(self, job_id: str) -> None:
        """Note that a suspect passed its trial, or is gone. Does nothing for any other job."""
        if self._trial == job_id:
            self._trial = None
            self._change.set()

    async def until_empty(self, reader: object) -> None:
        """Wait until nothing is in work; nobody but `reader` reads until it has read once."""
        self._reader = reader
        while self.is_used:
            self._change.clear()
            await self._change.wait()

    def note_read(
        self, reader: object, ask: ReadRequest, num_read: int = 0, num_batch: int = 0
    ) -> None:
        """Note what a read brought.

        num_batch  how many of the jobs are known to be of the class `batch`
        """
        self._reader = None if self._reader is reader else self._reader
        self._num_expected -= ask.count
        self._num_expected_batch -= ask.batch or 0
        self._num_preparing += num_read
        self._num_preparing_batch += num_batch
        self._change.set()

    def note_prepared(self, is_batch: bool = False) -> None:
        """Note that a job that was read has put its sequences into the engine, or has none."""
        self._num_preparing -= 1
        self._num_preparing_batch -= is_batch
        self._change.set()

    def enter(self, additions: Iterable[AddSequence]) -> None:
        for addition in additions:
            num_tokens = len(addition.prompt) + len(addition.completion)
            max_tokens = addition.params.max_tokens or COMPLETION_TOKENS
            self._sequences[addition.seq_id] = addition
            self._num_batch += addition.priority == BATCH_PRIORITY
            if not addition.params.use_beam_search:  # a search shows nothing before its end
                self._new_blocks[addition.seq_id] = self._blocks(num_tokens)
            blocks = self._blocks(num_tokens + min(max_tokens, COMPLETION_TOKENS))
            self._average_blocks += _WEIGHT * (blocks - self._average_blocks)

    def leave(self, seq_id: str) -> None:
        addition = self._sequences.pop(seq_id, None)
        self._num_batch -= addition is not None and addition.priority == BATCH_PRIORITY
        self._new_blocks.pop(seq_id, None)
        self._change.set()

    def note(self, step: Step) -> None:
        self._load, self._step_s = step.load, step.seconds
        for output in step.outputs:
            self._new_blocks.pop(output.seq_id, None)
        self._change.set()

    def free(self) -> int:
        """Return the number of jobs for which there is room, if none of them is of a batch.

        With nothing in work it is at least one: a job that can never fit is refused later.
        """
        batch = self._load.batch
        if batch is None:
            return self._free_beside(
                len(self._sequences), self._load.num_held_blocks, self._new_blocks
            )
        num_others = len(self._sequences) - self._num_batch
        new_ids = [
            seq_id for seq_id in self._new_blocks if self._priority(seq_id) != BATCH_PRIORITY
        ]
        num_held = max(0, self._load.num_held_blocks - batch.num_blocks)
        return self._free_beside(num_others, num_held, new_ids, self._num_preparing_batch)

    def _free_beside(
        self, num_seqs: int, num_held: int, new_ids: Iterable[str], num_yielding: int = 0
    ) -> int:
        """Return the room beside so many sequences and blocks.

        new_ids       the sequences whose blocks are not among these
        num_yielding  how many of the jobs that come give way
        """
        if self._trial is not None:
            return 0
        num_coming = self._num_expected + self._num_preparing - num_yielding
        seqs = self._limits.max_num_seqs - num_seqs - num_coming
        if not num_seqs and not num_coming:
            return max(1, min(seqs, int(self._limits.num_blocks / self._average_blocks)))
        if self._load.num_waiting:
            return 0
        blocks = (
            self._limits.num_blocks - num_held - sum(map(self._new_blocks.__getitem__, new_ids))
        )
        return max(0, min(seqs, int(blocks / self._average_blocks) - num_coming))

    def _free_for_batch(self) -> int | None:
        """Return the number of jobs of the class `batch` that have room; None: no bound."""
        batch = self._load.batch
        if batch is None:
            return None
        if batch.num_waiting:
            return 0
        num_coming = self._num_expected_batch + self._num_preparing_batch
        free = self._free_beside(len(self._sequences), self._load.num_held_blocks, self._new_blocks)
        return max(0, min(free, batch.most_seqs - self._num_batch - num_coming))

    def _ask(self) -> ReadRequest | None:
        if count := self.free():
            share = (count + self._num_expected) // self._num_lanes
            count, batch = min(count, max(1, share)), self._free_for_batch()
            return ReadRequest(count, batch=None if batch is None else min(batch, count))
        if down_to := self._preempts_for():
            return ReadRequest(1, down_to, held_rows=self._held_rows())
        if self._trial is None:
            return ReadRequest(_MOST_TEXTS, "text", held_rows=self._held_rows())
        return None

    def _preempts_for(self) -> QueueClass | None:
        """Return the lowest class of job to which running sequences would give way, or None.

        One such job is read at a time: its first token shows that it found room.
        """
        if self._threshold is None or self._trial is not None or self._num_preparing:
            return None
        for priority, name in _CLASSES:
            least = priority + self._threshold
            num_below = sum(seq.priority >= least for seq in self._sequences.values())
            if self._load.batch is not None:  # to these there is room
                num_below -= self._num_batch
            is_coming = any(self._priority(seq_id) <= priority for seq_id in self._new_blocks)
            if num_below > self._load.num_waiting and not is_coming:
                return name
        return None

    def _held_rows(self) -> dict[QueueClass, HeldRows]:
        """Return the rows of the classes in which a tenant might give one to another.

        One job is read for such a row at a time, as for a class. All that wait in the engine are
        taken for those of the tenant with the most, so that nothing is read that would wait there.
        """
        if self._load.batch is None or self._num_preparing or self._num_expected:
            return {}
        held_rows: dict[QueueClass, HeldRows] = {}
        for priority, name in _CLASSES:
            below = [
                seq for seq in self._sequences.values() if priority <= seq.priority < BATCH_PRIORITY
            ]
            rows, weights = (
                Counter(seq.owner for seq in below),
                {seq.owner: seq.weight for seq in below},
            )
            most = max(rows, key=lambda owner: rows[owner] / weights[owner], default=None)
            if most is None or self._is_coming_beside(most):
                continue
            rows[most] -= self._load.num_waiting
            if rows[most] > 1:
                held_rows[name] = HeldRows(most, weights[most], rows)
        return held_rows

    def _is_coming_beside(self, owner: str) -> bool:
        """Return whether a sequence of another owner gave no token yet: perhaps it has no row."""
        new_seqs = map(self._sequences.__getitem__, self._new_blocks)
        return any(seq.owner != owner and seq.priority < BATCH_PRIORITY for seq in new_seqs)

    def _priority(self, seq_id: str) -> int:
        return self._sequences[seq_id].priority

    def _blocks(self, num_tokens: int) -> float:
        return -(-num_tokens // self._limits.block_size)
