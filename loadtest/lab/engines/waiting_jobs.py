"""The cost of each call of the queue while so many jobs wait in one lane."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from penstock.compose.server import Server
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.lab.machine.server_cost import Meter, ServerCost
from penstock.schemas.delivery import Outcome
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect

MODEL, WORKER = "deep", "bench"
PROMPT = "x" * 100
NUM_CALLS = 50  # calls of each kind
_AT_ONCE = 128
_LEASE_MS = 3_600_000
_MOST = 10_000_000
_FIRST_LOOK_S = 2.1  # after which a sweep looks at a foreground job: is anybody listening?


@dataclass(frozen=True, slots=True)
class CallCost:
    """The cost of one kind of call.

    round_trip_us  from asking to the answer, alone, the median
    """

    of_server: ServerCost
    round_trip_us: float


@dataclass(slots=True)
class AtDepth:
    """The figures with so many jobs waiting."""

    num_waiting: int
    memory_bytes_a_job: float
    calls: dict[str, CallCost] = field(default_factory=dict)


async def costs_at(depths: Sequence[int], num_tenants: int) -> list[AtDepth]:
    """Fill a lane with the jobs of so many tenants, and measure at each depth, from the least."""
    async with _lane() as lane:
        empty_bytes = await lane.meter.memory_bytes()
        figures = []
        for depth in sorted(depths):
            await lane.fill(depth, num_tenants)
            used_bytes = await lane.meter.memory_bytes() - empty_bytes
            at_depth = AtDepth(depth, used_bytes / len(lane.job_ids))
            figures.append(at_depth)
            for name, call in lane.calls().items():
                at_depth.calls[name] = await lane.cost_of(call)
    for at_depth in figures:
        at_depth.calls["look at one in the foreground"] = await _look_cost(
            at_depth.num_waiting, num_tenants
        )
    return figures


async def _look_cost(depth: int, num_tenants: int) -> CallCost:
    """Return what a sweep costs for each foreground job that it looks at."""
    async with _lane(background=False) as lane:
        await lane.fill(depth, num_tenants)
        await asyncio.sleep(_FIRST_LOOK_S)
        await lane.meter.begin()
        begin_s = time.perf_counter()
        num_jobs = await lane.sweep()
        took_s = time.perf_counter() - begin_s
        return CallCost(await lane.meter.cost(num_jobs), took_s / num_jobs * 1e6)


@asynccontextmanager
async def _lane(background: bool = True) -> AsyncIterator["_DeepLane"]:
    with Server() as server:
        async with connect(server.url) as redis:
            await Registry(redis).register(ModelCard(name=MODEL))
            queue = WorkerQueue(redis, Lane(MODEL), _LEASE_MS)
            await queue.register(WORKER, WorkerCard())
            await queue.read(WORKER, 1)
            yield _DeepLane(queue, Meter(redis), background)


class _DeepLane:
    def __init__(self, queue: WorkerQueue, meter: Meter, background: bool) -> None:
        self.meter = meter
        self.job_ids: list[tuple[str, str]] = []  # each with its tenant
        self.sweep = queue.sweep
        self._queue = queue
        self._background = background
        self._num_claimed = 0

    async def fill(self, depth: int, num_tenants: int) -> None:
        """Submit jobs until so many wait."""
        while (shortage := depth + self._num_claimed - len(self.job_ids)) > 0:
            first, count = len(self.job_ids), min(shortage, _AT_ONCE)
            tenants = [f"t{number % num_tenants}" for number in range(first, first + count)]
            await asyncio.gather(*map(self._submit, tenants))

    def calls(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return each kind of call. As many jobs are claimed at the end as were put in."""
        sample = cycle(self.job_ids[-1 :: -max(1, len(self.job_ids) // NUM_CALLS)])
        return {
            "status": lambda: self._queue.status(*next(sample)),
            "counts": self._queue.counts,
            "sweep": self.sweep,
            "reap": self._queue.reap,
            "enqueue": lambda: self._submit("t0"),
            "claim": self._claim,
        }

    async def cost_of(self, call: Callable[[], Awaitable[object]]) -> CallCost:
        took_s = []
        await self.meter.begin()
        for _ in range(NUM_CALLS):
            begin_s = time.perf_counter()
            await call()
            took_s.append(time.perf_counter() - begin_s)
        return CallCost(await self.meter.cost(NUM_CALLS), float(np.median(took_s)) * 1e6)

    async def _submit(self, tenant: str) -> None:
        job_id = self._queue.lane.new_job_id()
        job = Job(
            job_id=job_id,
            model=MODEL,
            prompts=[PROMPT],
            tenant=tenant,
            background=self._background,
        )
        answer = await self._queue.enqueue(job, None, max_queued=_MOST)
        if answer.outcome is not Outcome.ACCEPTED:
            raise CannotMeasure(f"a job was not accepted: {answer.outcome}")
        self.job_ids.append((tenant, job_id))

    async def _claim(self) -> None:
        entries = await self._queue.read(WORKER, 1)
        if not entries:
            raise CannotMeasure("a waiting job could not be claimed")
        self._num_claimed += 1
