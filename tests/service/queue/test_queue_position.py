"""What a job that waits is told: its place, the reason, and when it may expect to begin."""

import asyncio
import itertools
from statistics import median

from penstock.schemas.account import Account, Quota
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, deltas, finish, on_a_lane, started
from stepped import SteppedWorker


@on_a_lane
async def test_over_a_drain_a_position_never_rises_and_the_eta_is_about_right(
    queue: WorkerQueue,
) -> None:
    """Half of the ETAs are right to 50 %, in one of three drains: the machine may have stalled."""
    for _ in range(3):
        if median(await drain(queue)) < 0.5:
            return
    raise AssertionError("no drain had a median error below 50 %")


async def drain(queue: WorkerQueue) -> list[float]:
    """60 jobs, four at once, each asked for every few steps: the errors of its ETAs, relative."""
    jobs = [a_job(background=True, params={"max_tokens": 4}) for _ in range(60)]
    await asyncio.gather(*(queue.enqueue(job, None, "d") for job in jobs))
    redis, worker = plain(queue.connection.redis), SteppedWorker(queue, 4)
    told: list[tuple[str, int, int]] = []  # job, when it was asked for, and its ETA
    last = {job.job_id: len(jobs) for job in jobs}
    for step in itertools.count():
        if len(worker.ended) == len(jobs):
            break
        await worker.step()
        await asyncio.sleep(0.02)
        for job in jobs[step % 6 :: 6]:
            status = await queue.status("default", job.job_id)
            if status.state == "ready":
                seconds, micros = await redis.time()
                assert status.position and status.position <= last[job.job_id]
                last[job.job_id] = status.position
                if status.eta_ms is not None:
                    told.append((job.job_id, seconds * 1000 + micros // 1000, status.eta_ms))
    errors = []
    for job_id, asked_ms, eta_ms in told:
        began_ms = (await queue.status("default", job_id)).started_ms
        assert began_ms is not None
        errors.append(abs(asked_ms + eta_ms - began_ms) / max(1, began_ms - asked_ms))
    assert len(errors) > 100
    return errors


@on_a_lane
async def test_without_a_worker_nobody_says_when(queue: WorkerQueue) -> None:
    account = Account(name="key", limits=Quota(requests_per_minute=2))
    first, waiting, held = (a_job(background=True, over_limit="wait") for _ in range(3))
    for job in (first, waiting, held):
        await queue.enqueue(job, None, "d", account=account)
    await finish(queue, await started(queue), deltas(first.job_id, 2))
    status = await queue.status("default", waiting.job_id)
    assert status.reason == "capacity" and status.eta_ms is not None
    status = await queue.status("default", held.job_id)
    assert status.reason == "rate" and status.eta_ms and 30_000 < status.eta_ms <= 60_000
    await queue.unregister("w")
    for job in (waiting, held):
        status = await queue.status("default", job.job_id)
        assert (status.reason, status.eta_ms) == ("no_worker", None)
    assert status.position == 2


@on_a_lane
async def test_a_suspect_says_that_it_is_one(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    await started(queue)
    await queue.unregister("w", crashed=True)
    await SteppedWorker(queue, 1, "v").register()
    assert await plain(queue.connection.redis).hget(LANE.job(job.job_id), "ready") == b"suspect"
    assert (await queue.status("default", job.job_id)).reason == "suspect"
