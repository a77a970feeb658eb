"""A real worker beside a thousand jobs of one tenant: how long another's ten wait.

Counted in turns, as Redis gave them: a busy machine changes seconds, and no order.
"""

import asyncio
from collections.abc import Iterable
from itertools import chain
from statistics import median

import pytest
import redis

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import Lane
from worker_process import WorkerProcess, ask

Turn = tuple[int, int]
LANE, NUM_FLOOD, NUM_SMALL, SLOTS = Lane("fake"), 1000, 10, 4


@pytest.mark.slow
def test_a_thousand_jobs_of_one_tenant_delay_anothers_ten_less_than_twice() -> None:
    flags = ("--max-num-seqs", str(SLOTS), "--fake-step-ms", "2")
    with (
        Server() as server,
        WorkerProcess(server.url, "fake", *flags) as worker,
        redis.Redis.from_url(server.url, decode_responses=True) as store,
    ):
        worker.ready()

        async def asks(client: QueueClient) -> None:
            async def submit(tenant: str, count: int) -> list[str]:
                jobs = (
                    client.enqueue(
                        [7] * 5, tenant=tenant, background=True, max_tokens=40, ignore_eos=True
                    )
                    for _ in range(count)
                )
                return await asyncio.gather(*jobs)

            async def small(count: int) -> list[str]:
                """So many jobs at once, to their ends."""
                job_ids = await submit("small", count)
                for job_id in job_ids:
                    await client.result(job_id, tenant="small")
                return job_ids

            flood = await submit("flood", NUM_FLOOD)
            at_once = await small(NUM_SMALL)
            one_by_one = [await small(1) for _ in range(NUM_SMALL)]
            taken = turns(store, [*flood, *at_once, *chain(*one_by_one)])
            assert any(each not in taken for each in flood), "the flood was over before it was seen"
            # Alone they have turns 1, 2, 3 ..; a worker takes as many at once as it has slots.
            beside = waits(store, taken, at_once)
            assert all(it <= 2 * alone + SLOTS for alone, it in enumerate(beside, start=1)), beside
            singly = [waits(store, taken, one)[0] for one in one_by_one]
            assert median(singly) <= 2 and max(singly) <= 1 + SLOTS, singly

        ask(server.url, asks)


def turns(store: redis.Redis, job_ids: Iterable[str]) -> dict[str, Turn]:
    """In which order they were given to the worker; those that were not are left out."""
    pipe, job_ids = store.pipeline(), list(job_ids)
    for job_id in job_ids:
        pipe.hget(LANE.job(job_id), "entry")
    entries = zip(job_ids, pipe.execute(), strict=True)
    return {job_id: turn_of(entry) for job_id, entry in entries if entry is not None}


def turn_of(entry: str) -> Turn:
    ms, _, number = entry.partition("-")
    return int(ms), int(number)


def waits(store: redis.Redis, taken: dict[str, Turn], job_ids: list[str]) -> list[int]:
    """In how many turns from their submission, its millisecond left out, each of them had its."""
    since_ms = min(int(store.hget(LANE.job(each), "created_ms")) for each in job_ids)
    given = [turn for turn in taken.values() if turn[0] > since_ms]
    return sorted(1 + sum(turn < taken[each] for turn in given) for each in job_ids)
