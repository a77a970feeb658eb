"""The jobs in work: their sequences go to the engine, and what it makes of them to the readers.

It commits deltas, obeys the queue's signals and ends jobs.

There is one commit at a time. While it runs, steps go on and merge, so a slow Redis makes larger
deltas and not a longer queue.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.schemas.delivery import JobSignal, OutOfBudget
from penstock.schemas.errors import AnswerTooLarge, Unavailable
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.engine.io.messages import AddSequence, CancelSequence, Output
from penstock.worker.jobs.active_job import ActiveJob
from penstock.worker.jobs.capacity import Capacity
from penstock.worker.jobs.job_counts import JobCounts
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.process.ipc import EngineCommand
from penstock.worker.process.log import log

if TYPE_CHECKING:
    from penstock.worker.jobs.job_spans import JobSpans

MAX_BEHIND_TOKENS = 64  # not logged of a choice; with more the engine pauses
MAX_BEHIND_S = 2.0
RETRY_S = 0.1  # when Redis is away; the connection has tried several times before it says so
_END_TOGETHER = 32  # finish calls at a time


class Streamer:
    """The jobs of one lane that are in work under one incarnation."""

    def __init__(
        self,
        queue: WorkerQueue,
        incarnation: str,
        lease: LeaseClock,
        capacity: Capacity,
        send: Callable[[list[EngineCommand]], None],
        spans: "JobSpans | None" = None,
        counts: JobCounts | None = None,
    ) -> None:
        self.queue = queue
        self.incarnation = incarnation
        self.lease = lease
        self.jobs: dict[str, ActiveJob] = {}
        self._capacity = capacity
        self._send = send
        self._spans = spans
        self._counts = counts or JobCounts()
        self._model_counts = self._counts.of(queue.lane.model)
        self._seqs: dict[str, tuple[ActiveJob, int]] = {}
        self._expiries: dict[ActiveJob, asyncio.TimerHandle] = {}
        self._dirty: set[ActiveJob] = set()
        self._work = asyncio.Event()
        self._lock = asyncio.Lock()

    def admit(self, active: ActiveJob, additions: list[AddSequence]) -> None:
        """Put a job's sequences into the engine; a job that has none left to run ends at once."""
        self.jobs[active.job.job_id] = active
        self._counts.began(active)
        for index in active.open_choices():
            self._seqs[active.seq_id(index)] = active, index
        self._capacity.enter(additions)
        self._send([*additions])
        active.times.admitted_ns = time.time_ns()
        if active.attempt.left_ms is not None:
            later = asyncio.get_running_loop().call_later
            self._expiries[active] = later(
                active.attempt.left_ms / 1000, self._end_early, active, active.expire
            )
        if active.is_over:
            self._touch(active)

    def take(self, outputs: Iterable[Output]) -> None:
        """Take the outputs of a step; those of sequences that are not ours any more are dropped."""
        for output in outputs:
            entry = self._seqs.get(output.seq_id)
            if entry is None:
                continue
            active, index = entry
            if output.error is not None:
                active.fail("failed", output.error)
                self._stop(active)
            elif active.take(index, output):
                self._send([CancelSequence(output.seq_id)])
            if active.has_ended(index):
                self._leave(output.seq_id)
            if active.behind_since_s is not None or active.is_over:
                self._touch(active)

    def obey(self, signals: Mapping[str, JobSignal]) -> None:
        """Act on the queue's signals about jobs; jobs that it does not name go on."""
        for job_id, signal in signals.items():
            active = self.jobs.get(job_id)
            if active is None:
                continue
            if signal is JobSignal.FENCE:
                log.info("job %s was taken away", job_id, extra=active.log_fields)
                self._forget(active, "lost")
            elif signal is JobSignal.CANCEL:
                self._end_early(active, active.cancel)
            elif signal is JobSignal.DEADLINE:
                self._end_early(active, active.expire)
            elif signal is JobSignal.BUDGET:
                self._end_early(active, active.spend)

    def is_behind(self) -> bool:
        """Return whether a job has more output that is not logged than may be lost or held."""
        now = time.monotonic()
        return any(
            active.num_behind > MAX_BEHIND_TOKENS * len(active.completions)
            or (active.behind_since_s is not None and now - active.behind_since_s > MAX_BEHIND_S)
            for active in self._dirty
        )

    async def run(self) -> None:
        """Commit and finish for as long as the incarnation works."""
        is_away = False
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while self._dirty:
                    await self._settle(self._dirty)
                is_away = False
            except Unavailable as error:
                if not is_away:
                    log.warning("queue could not be written, trying again: %s", error.message)
                is_away = True
                await asyncio.sleep(RETRY_S)
                self._work.set()

    def stop_all(self) -> list[ActiveJob]:
        """Cancel the sequences of all jobs, which stay this worker's."""
        jobs = list(self.jobs.values())
        for active in jobs:
            self._stop(active)
        return jobs

    async def hand_back(self, jobs: list[ActiveJob]) -> None:
        """Give stopped jobs to other workers, with all that was made, once the queue answers."""
        while jobs:
            try:
                while not self._dirty.isdisjoint(jobs):
                    await self._settle(jobs)
                job_ids = [active.job.job_id for active in jobs if active.job.job_id in self.jobs]
                count = await self.queue.release(self.incarnation, job_ids)
                log.info("handed back %d jobs", count)
                break
            except Unavailable:
                await asyncio.sleep(RETRY_S)
        for active in jobs:
            self._forget(active, "handed_back")

    def drop(self) -> None:
        """Forget all jobs; whoever holds them now goes on from the log."""
        for active in list(self.jobs.values()):
            self._forget(active, "lost")

    async def _settle(self, among: Collection[ActiveJob]) -> None:
        async with self._lock:
            await self.lease.holds()
            dirty = [active for active in among if active in self._dirty]
            ending = [active for active in dirty if active.is_over]
            if running := [active for active in dirty if not active.is_over]:
                await self._commit(running)
            for at in range(0, len(ending), _END_TOGETHER):
                finishes = map(self._finish, ending[at : at + _END_TOGETHER])
                for failure in await asyncio.gather(*finishes, return_exceptions=True):
                    if failure is not None:
                        raise failure

    async def _commit(self, running: list[ActiveJob]) -> None:
        commits = [active.commit() for active in running]
        began_s = time.monotonic()
        signals = await self.queue.commit(self.incarnation, commits)
        num_fenced = list(signals.values()).count(JobSignal.FENCE)
        self._counts.committed(time.monotonic() - began_s, num_fenced)
        if num_fenced < len(signals):
            self.lease.renew(began_s)
        for active, commit in zip(running, commits, strict=True):
            if signals[commit.job_id] is JobSignal.BUDGET:  # `finish` will say how far it is logged
                continue
            if signals[commit.job_id] is not JobSignal.FENCE:
                self._model_counts.logged(active, commit.deltas)
            active.note_committed(commit)
            if active.has_passed_trial:
                self._capacity.end_trial(active.job.job_id)
            if active.behind_since_s is None and not active.is_over:
                self._dirty.discard(active)
        self.obey(signals)

    async def _finish(self, active: ActiveJob) -> None:
        ending = active.ending()
        try:
            is_ours = await self.queue.finish(self.incarnation, ending)
        except OutOfBudget as budget:
            active.cut(budget.position)
            self._touch(active)
            return
        except AnswerTooLarge as error:
            active.fail("failed", error.body())
            self._touch(active)
            return
        if is_ours:
            self._counts.ended(active)
            self._model_counts.logged(active, ending.deltas[ending.num_committed :])
            self._model_counts.ended(active)
        else:
            self._counts.was_fenced()
        state = active.failure[0] if active.failure else "succeeded"
        outcome = state if is_ours else "it was not ours"
        log.info(
            "job %s ended: %s, %d tokens",
            active.job.job_id,
            outcome,
            active.position,
            extra=active.log_fields,
        )
        self._forget(active, state if is_ours else "lost")

    def _touch(self, active: ActiveJob) -> None:
        self._dirty.add(active)
        self._work.set()

    def _end_early(self, active: ActiveJob, end: Callable[[], None]) -> None:
        if not active.is_over:
            end()
            self._stop(active)
            self._touch(active)

    def _stop(self, active: ActiveJob) -> None:
        """Free the job's sequences in the engine; what they still send is dropped."""
        seq_ids = [active.seq_id(index) for index in range(active.num_sequences)]
        self._send([CancelSequence(seq_id) for seq_id in seq_ids if self._leave(seq_id)])

    def _leave(self, seq_id: str) -> bool:
        """Forget a sequence, and return whether it was in the engine until now."""
        self._capacity.leave(seq_id)
        return self._seqs.pop(seq_id, None) is not None

    def _forget(self, active: ActiveJob, outcome: str) -> None:
        self._stop(active)
        if self._spans and self.jobs.get(active.job.job_id) is active:
            self._spans.ended(active, outcome)
        self._dirty.discard(active)
        self._capacity.end_trial(active.job.job_id)
        if self.jobs.get(active.job.job_id) is active:
            del self.jobs[active.job.job_id]
        if expiry := self._expiries.pop(active, None):
            expiry.cancel()
