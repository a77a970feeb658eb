"""A queue for a test, and a worker without an engine: its tokens follow from the job's id alone."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import redis.asyncio

from penstock.schemas.delivery import Commit, Ending, JobSignal, Started
from penstock.schemas.errors import Cancelled, DeadlineExceeded
from penstock.schemas.event import Delta, Done, Failed, Usage
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.wire.checksum import EMPTY, roll
from plain import plain

MODEL = "tiny"
LANE = Lane(MODEL)
PIECES = ("a", "é", "", "日本", "\n", '"', " the", "🙂")


@asynccontextmanager
async def queue_at(url: str, **settings: int) -> AsyncIterator[WorkerQueue]:
    link = connect(url)
    try:
        await Registry(link).register(ModelCard(name=MODEL))
        yield WorkerQueue(link, LANE, **settings)
    finally:
        await link.aclose()


def redis_of(queue: WorkerQueue) -> redis.asyncio.Redis:
    """The queue's server, past the queue."""
    return plain(queue.connection.redis)


def on_a_lane(test: Callable[[WorkerQueue], Awaitable[None]]) -> Callable[[str], None]:
    """A test of one queue on an empty database, with the worker `w` registered."""

    def run(redis_url: str) -> None:
        async def main() -> None:
            async with queue_at(redis_url) as queue:
                await queue.register("w", WorkerCard())
                await test(queue)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def a_job(**fields: object) -> Job:
    return Job.model_validate(
        {"job_id": LANE.new_job_id(), "model": MODEL, "prompts": ["x"], **fields}
    )


def bury(redis_url: str, prompt: str = "CANARY-577") -> str:
    """A job dies of three crashes; its id."""

    async def crash() -> str:
        async with queue_at(redis_url) as queue:
            job = a_job(prompts=[prompt], background=True, tenant="acme")
            await queue.enqueue(job, None)
            for number in range(3):
                worker = f"w{number}{job.job_id[-4:]}"
                await queue.register(worker, WorkerCard())
                [entry] = await queue.read(worker, 1, alone=True) or []
                assert await queue.start(worker, entry)
                await queue.unregister(worker, crashed=True)
            return job.job_id

    return asyncio.run(crash())


def delta(job_id: str, position: int, num_tokens: int = 1, index: int = 0) -> Delta:
    """The tokens of a job at a position, the same for every worker that makes them."""
    ids, text = [], ""
    for at in range(position, position + num_tokens):
        token = hashlib.blake2b(f"{job_id}{at}".encode(), digest_size=1).digest()[0]
        ids.append(token)
        text += PIECES[token % len(PIECES)]
    return Delta(position=position, index=index, token_ids=ids, text=text)


def continued(job_id: str, made: list[Delta], num_tokens: int = 1, index: int = 0) -> Delta:
    """The next delta of a log, with the checksum of all that came before."""
    new = delta(job_id, made[-1].end if made else 0, num_tokens, index)
    before = made[-1].checksum if made else EMPTY
    assert before is not None
    return msgspec.structs.replace(new, checksum=roll(before, index, new.token_ids))


def deltas(job_id: str, *counts: int) -> list[Delta]:
    made: list[Delta] = []
    for count in counts:
        made.append(continued(job_id, made, count))
    return made


def done(made: list[Delta]) -> Done:
    end = made[-1].end if made else 0
    checksum = made[-1].checksum if made else EMPTY
    usage = Usage(prompt_tokens=1, completion_tokens=end)
    return Done(position=end, usage=usage, checksum=checksum)


async def started(queue: WorkerQueue, worker: str = "w") -> Started:
    """The next job, taken up."""
    entries = await queue.read(worker, 1)
    assert entries, "nothing to read"
    taken = await queue.start(worker, entries[0])
    assert taken is not None
    return taken


async def finish(queue: WorkerQueue, taken: Started, made: list[Delta], worker: str = "w") -> bool:
    ending = Ending(taken.job, taken.epoch, made, len(taken.log), done(made))
    return await queue.finish(worker, ending)


@dataclass(slots=True)
class ScriptedWorker:
    """Runs every job that it reads, `num_tokens` tokens each, a step for all of them at once."""

    queue: WorkerQueue
    name: str = "w"
    num_tokens: int = 12
    step_s: float = 0.0
    running: dict[str, tuple[Started, list[Delta]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        await self.queue.register(self.name, WorkerCard(max_num_seqs=64))
        while True:
            room = 64 - len(self.running)
            if not self.running:
                await self.queue.news(500)
            for entry in await self.queue.read(self.name, room, not self.running) or []:
                if (taken := await self.queue.start(self.name, entry)) is not None:
                    self.running[taken.job.job_id] = (taken, list(taken.log))
            await self.step()
            await asyncio.sleep(self.step_s)

    async def step(self) -> None:
        commits = []
        for job_id, (taken, made) in self.running.items():
            new = continued(job_id, made)
            made.append(new)
            commits.append(Commit(job_id, taken.epoch, [new]))
        signals = await self.queue.commit(self.name, commits)
        for job_id, signal in signals.items():
            taken, made = self.running[job_id]
            if end := self._end(signal, made):
                await self.queue.finish(
                    self.name, Ending(taken.job, taken.epoch, made, len(made), end)
                )
            if end or signal is JobSignal.FENCE:
                del self.running[job_id]

    def _end(self, signal: JobSignal, made: list[Delta]) -> Done | Failed | None:
        position = made[-1].end
        if signal is JobSignal.CANCEL:
            error = Cancelled("the job was cancelled").body()
            return Failed(position=position, state="cancelled", error=error)
        if signal is JobSignal.DEADLINE:
            error = DeadlineExceeded("out of time").body()
            return Failed(position=position, state="expired", error=error)
        return done(made) if position >= self.num_tokens and signal is not JobSignal.FENCE else None
