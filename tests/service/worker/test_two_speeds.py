"""A slow and a fast worker on one lane: each takes what it can run, and who matters overtakes."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import JobStatus
from penstock.schemas.keys import Lane
from plain import plain
from worker_process import WorkerProcess, ask

NUM_JOBS, NUM_BEGUN, SEATS = 500, 60, 4
SLOW_MS, FAST_MS = 800, 5
LEASE_MS, NUM_LEASES = 2000, 5


@dataclass(slots=True)
class Ran:
    """How all jobs stood in the end; `late` is of a higher class, submitted among the last."""

    jobs: list[JobStatus]
    late: JobStatus
    slow: list[JobStatus]


def worker_of(url: str, step_ms: int, *flags: str) -> WorkerProcess:
    speed = ("--fake-step-ms", str(step_ms), "--max-num-seqs", str(SEATS))
    return WorkerProcess(url, "fake", *speed, *flags)


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    found: list[Ran] = []

    async def asks(client: QueueClient, slow: WorkerProcess) -> None:
        asked = {"max_tokens": 2, "ignore_eos": True, "background": True}
        job_ids = await asyncio.gather(
            *(client.enqueue(f"job {number}", model="fake", **asked) for number in range(NUM_JOBS))
        )
        [queue] = await client.queues()
        while (await queue.counts()).num_ended < NUM_BEGUN:
            await asyncio.sleep(0.01)
        late = await client.enqueue("late", model="fake", priority_class="high", **asked)
        while (await queue.counts()).num_ended < NUM_JOBS + 1:
            await asyncio.sleep(0.01)
        statuses = await asyncio.gather(*map(client.status, [*job_ids, late]))
        own = [each for each in statuses if f"-{slow.process.pid}-" in each.worker]
        found.append(Ran(statuses[:-1], statuses[-1], own))

    lease = ("--lease-ttl-ms", "20000")
    with (
        Server() as server,
        worker_of(server.url, SLOW_MS, *lease) as slow,
        worker_of(server.url, FAST_MS, *lease) as fast,
    ):
        slow.ready()
        fast.ready()
        ask(server.url, lambda client: asks(client, slow))
        yield found[0]


@pytest.mark.slow
def test_jobs_are_shared_out_by_speed(ran):
    """One is a hundred and sixty times as fast; a fortieth of that is left on a busy machine."""
    assert {job.state for job in ran.jobs} == {"succeeded"}
    print(f"the slow one ran {len(ran.slow)} of {NUM_JOBS}")
    assert len(ran.slow) * 4 < NUM_JOBS


@pytest.mark.slow
def test_none_waits_inside_the_slow_worker(ran):
    """It never has more than it can run at once, and those that it is just putting away."""
    assert len(ran.slow) >= SEATS
    for job in ran.slow:
        others = [each for each in ran.slow if each.started_ms <= job.started_ms < each.ended_ms]
        assert len(others) <= 2 * SEATS


@pytest.mark.slow
def test_a_late_job_of_a_higher_class_overtakes_all_that_nobody_had_drawn(ran):
    """Only what was claimed as it came began before it."""
    waited = [job for job in ran.jobs if job.started_ms >= ran.late.created_ms]
    before = [job for job in waited if job.started_ms < ran.late.started_ms]
    print(f"it overtook {len(waited) - len(before)} of {len(waited)}")
    assert len(waited) > NUM_JOBS / 2
    assert len(before) <= 2 * SEATS


@pytest.mark.slow
def test_a_job_of_five_leases_is_one_attempt_under_one_epoch():
    """In a prefill, which commits nothing: beats alone renew. Another worker looks for lapses."""
    step_ms, step_tokens = 100, 64
    prompt = "x" * (LEASE_MS * NUM_LEASES // step_ms * step_tokens)
    flags = ("--max-num-batched-tokens", str(step_tokens), "--lease-ttl-ms", str(LEASE_MS))

    async def asks(client: QueueClient) -> None:
        job_id = await client.enqueue(prompt, max_tokens=2, background=True)
        await client.result(job_id)
        status = await client.status(job_id)
        assert status.ended_ms - status.started_ms >= LEASE_MS * NUM_LEASES
        prefix = Lane("fake").prefix
        assert await plain(client.redis).hget(f"{prefix}job:{job_id}", "epoch") == b"1"
        counts = await plain(client.redis).hgetall(f"{prefix}counts")
        assert not {b"reaped", b"requeued"} & counts.keys()

    with Server() as server:
        workers = [worker_of(server.url, step_ms, *flags) for _ in range(2)]
        with workers[0], workers[1]:
            for worker in workers:
                worker.ready()
            ask(server.url, asks)
