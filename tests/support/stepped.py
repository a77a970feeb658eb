"""A worker that goes one step at a time: a test counts in ends and tokens, not in seconds."""

from collections import Counter
from dataclasses import dataclass, field

from penstock.schemas.delivery import Commit, Ending, JobSignal, OutOfBudget, Started
from penstock.schemas.event import Delta
from penstock.schemas.job import Job
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from scripted import delta, done


@dataclass(slots=True)
class SteppedWorker:
    """`slots` jobs at once, a token of each in a step, as many as the job's max_tokens say."""

    queue: WorkerQueue
    slots: int
    name: str = "w"
    running: dict[str, tuple[Started, list[Delta]]] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    num_tokens: Counter[str] = field(default_factory=Counter)  # made, by tenant

    async def register(self) -> None:
        await self.queue.register(self.name, WorkerCard())

    async def step(self) -> None:
        await self.take_up()
        commits = []
        for job_id, (taken, made) in self.running.items():
            made.append(delta(job_id, made[-1].end if made else 0))
            commits.append(Commit(job_id, taken.epoch, made[-1:], 1, 0))
            self.num_tokens[taken.job.tenant] += 1
        signals = await self.queue.commit(self.name, commits)
        for job_id, signal in signals.items():
            taken, made = self.running[job_id]
            if signal is JobSignal.BUDGET or made[-1].end >= (taken.job.params.max_tokens or 1):
                await self.finish(taken, made)

    async def take_up(self) -> None:
        room = self.slots - len(self.running)
        for entry in (await self.queue.read(self.name, room) or []) if room else []:
            if (taken := await self.queue.start(self.name, entry)) is not None:
                self.running[taken.job.job_id] = (taken, list(taken.log))

    async def finish(self, taken: Started, made: list[Delta]) -> None:
        try:
            ending = Ending(taken.job, taken.epoch, made, len(made), done(made))
            assert await self.queue.finish(self.name, ending)
        except OutOfBudget as budget:
            made = [one for one in made if one.end <= budget.position]
            ending = Ending(taken.job, taken.epoch, made, len(made), done(made))
            assert await self.queue.finish(self.name, ending)
        self.ended.append(taken.job)
        del self.running[taken.job.job_id]
