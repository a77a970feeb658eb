"""`penstock bench link`: the CPU that a command of Redis takes in our client and in redis-py."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import redis.asyncio
import uvloop
from pydantic import Field
from redis._parsers import _AsyncHiredisParser, _AsyncRESP2Parser
from rich.console import Console
from rich.table import Table

from penstock.compose.server import Server
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.machine.usage import Neighbours, description
from penstock.schemas.delivery import Commit, JobSignal
from penstock.schemas.event import Delta
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.link import Reply, Word
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import parse

PROGRAM = "penstock bench link"
WORKER, KEY, VALUE = "bench", "link:value", "x" * 100
NUM_CALLERS = NUM_JOBS = 64
_LEASE_MS = 3_600_000
_STEP_US = 20_000
_TIMES_FEWER = 8  # commits of so many jobs, each of which takes the server long


class LinkSettings(Settings):
    """CPU of the client and commands a second, of our client of Redis and of redis-py, in turn.

    All have the same time-out, uvloop, and an embedded server, whose CPU does not count.
    """

    num_commands: int = Field(2048, ge=NUM_CALLERS, description="of each kind, a round")
    rounds: int = Field(7, ge=1, description="in each all clients take turns; the median counts")
    output_json: Path | None = Field(None, description="write the figures there too")


class RedisPy(Redis):
    """redis-py, called as our client is."""

    def __init__(self, url: str, parser: type[_AsyncHiredisParser | _AsyncRESP2Parser]) -> None:
        super().__init__(parse(url))
        self._client = redis.asyncio.Redis.from_url(
            url, socket_timeout=self.place.timeout_s, parser_class=parser
        )

    async def call(self, *words: Word) -> Reply:
        reply: Reply = await self._client.execute_command(*words)
        return reply

    async def aclose(self) -> None:
        await self._client.aclose()
        await super().aclose()


CLIENTS: dict[str, Callable[[str], Redis]] = {
    "Penstock": connect,
    "redis-py, hiredis": partial(RedisPy, parser=_AsyncHiredisParser),
    "redis-py alone": partial(RedisPy, parser=_AsyncRESP2Parser),
}


@dataclass(slots=True)
class Cost:
    """The cost of some commands; `cpu_s` is that of the thread in which the client runs."""

    num_commands: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @contextmanager
    def of(self, num_commands: int) -> Iterator[None]:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        self.cpu_s += time.thread_time() - cpu_s
        self.wall_s += time.perf_counter() - wall_s
        self.num_commands += num_commands


@dataclass(slots=True)
class Side:
    """One client, and a lane of its own in which its worker runs some jobs and others wait."""

    queue: WorkerQueue
    running: Sequence[tuple[str, int]]  # job and epoch
    num_logged: Counter[str] = field(default_factory=Counter)

    async def call(self, num_callers: int, num_commands: int, *words: Word) -> Cost:
        async def caller() -> None:
            for _ in range(num_commands // num_callers):
                await self.queue.connection.redis.call(*words)

        cost = Cost()
        with cost.of(num_commands // num_callers * num_callers):
            await asyncio.gather(*(caller() for _ in range(num_callers)))
        return cost

    async def claim(self, num_commands: int) -> Cost:
        """Claim one job a call, as a worker does whose jobs end one by one."""
        cost = Cost()
        for _ in range(num_commands // NUM_JOBS):
            job_ids: list[str] = []
            with cost.of(NUM_JOBS):
                for _ in range(NUM_JOBS):
                    entries = await self.queue.read(WORKER, 1, step_us=_STEP_US, batch=1)
                    job_ids += [entry.job_id for entry in entries or []]
            if await self.queue.release(WORKER, job_ids) != NUM_JOBS:
                raise CannotMeasure("a waiting job could not be claimed, or not be handed back")
        return cost

    async def commit(self, num_jobs: int, num_commands: int) -> Cost:
        """Log one token of each job a call, as a worker does after a step."""
        cost, jobs = Cost(), self.running[:num_jobs]
        steps = [[self._next(*job) for job in jobs] for _ in range(num_commands)]
        with cost.of(num_commands):
            signals = [await self.queue.commit(WORKER, commits) for commits in steps]
        if any({*by_job.values()} != {JobSignal.KEEP} for by_job in signals):
            raise CannotMeasure("a commit was not taken")
        return cost

    def _next(self, job_id: str, epoch: int) -> Commit:
        at = self.num_logged[job_id]
        self.num_logged[job_id] += 1
        return Commit(job_id, epoch, [Delta(at, [1000 + at], text=" word", checksum=at)])


WORK: dict[str, Callable[[Side, int], Awaitable[Cost]]] = {
    "PING, one caller": lambda side, count: side.call(1, count, "PING"),
    "GET, one caller": lambda side, count: side.call(1, count, "GET", KEY),
    "PING, 64 callers": lambda side, count: side.call(NUM_CALLERS, count, "PING"),
    "GET, 64 callers": lambda side, count: side.call(NUM_CALLERS, count, "GET", KEY),
    "claim of a job": Side.claim,
    "commit of one job": lambda side, count: side.commit(1, count),
    "commit of 64 jobs": lambda side, count: side.commit(NUM_JOBS, count // _TIMES_FEWER),
}
Figures = dict[str, dict[str, dict[str, float]]]


def main(argv: Sequence[str]) -> int:
    settings = load_settings(LinkSettings, PROGRAM, argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    with Neighbours() as neighbours:
        figures = uvloop.run(_measure(settings))
    console.print(_table(figures))
    console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    if settings.output_json is not None:
        result = {"machine": description(), "others": neighbours.share, "work": figures}
        settings.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


async def _measure(settings: LinkSettings) -> Figures:
    costs = {work: {name: list[Cost]() for name in CLIENTS} for work in WORK}
    async with AsyncExitStack() as stack:
        url = stack.enter_context(Server()).url
        sides = {name: await _side(stack, url, name) for name in CLIENTS}
        for work, run in WORK.items():
            for _ in range(settings.rounds):
                for name, side in sides.items():
                    costs[work][name].append(await run(side, settings.num_commands))
    return {
        work: {name: _figures(rounds) for name, rounds in clients.items()}
        for work, clients in costs.items()
    }


def _figures(rounds: Sequence[Cost]) -> dict[str, float]:
    return {
        "cpu_us": median(cost.cpu_s / cost.num_commands * 1e6 for cost in rounds),
        "commands_per_s": median(cost.num_commands / cost.wall_s for cost in rounds),
    }


async def _side(stack: AsyncExitStack, url: str, name: str) -> Side:
    """Return a client with its lane, which our own fills, and run each work once.

    So connections are made, and the server has the scripts, whose lack redis-py does not tell.
    """
    lane = Lane(name)
    async with connect(url) as own_client:
        await own_client.call("SET", KEY, VALUE)
        queue = WorkerQueue(own_client, lane, _LEASE_MS)
        await queue.register(WORKER, WorkerCard())
        for _ in range(2 * NUM_JOBS):
            job = Job(job_id=lane.new_job_id(), model=name, prompts=["x"], background=True)
            await queue.enqueue(job, None)
        entries = await queue.read(WORKER, NUM_JOBS) or []
        starts = [start for entry in entries if (start := await queue.start(WORKER, entry))]
    client = await stack.enter_async_context(CLIENTS[name](url))
    running = [(start.job.job_id, start.epoch) for start in starts]
    side = Side(WorkerQueue(client, lane, _LEASE_MS), running)
    for run in WORK.values():
        await run(side, NUM_JOBS)
    return side


def _table(figures: Figures) -> Table:
    table = Table(title="CPU microseconds a command, and commands a second", title_justify="left")
    table.add_column("command")
    for name in CLIENTS:
        table.add_column(f"{name}: us", justify="right")
        table.add_column("/s", justify="right")
    for work, clients in figures.items():
        cells = [(cost["cpu_us"], cost["commands_per_s"]) for cost in clients.values()]
        table.add_row(work, *(f"{figure:,.0f}" for cell in cells for figure in cell))
    return table
