"""What drifted apart in a lane is mended; a healthy lane, however busy, is left alone."""

import asyncio

from test_scripts import redis_of

from penstock.gateway.housekeeping.reconcile import Reconciler
from penstock.schemas.account import Account, Quota
from penstock.schemas.keys import Lane
from penstock.schemas.queue.worker_queue import WorkerQueue
from scripted import (
    LANE,
    ScriptedWorker,
    a_job,
    deltas,
    finish,
    on_a_lane,
    queue_at,
    started,
)

ONE_AT_A_TIME = Account(name="acme", limits=Quota(max_running=1))


def reconciler(queue: WorkerQueue, missing_ms: int = 0) -> Reconciler:
    return Reconciler(queue.connection.redis, missing_ms)


async def mend(queue: WorkerQueue) -> set[tuple[str, str]]:
    return set(await reconciler(queue).look(queue, 60))


@on_a_lane
async def test_a_job_that_nobody_would_find_is_put_back(queue: WorkerQueue) -> None:
    jobs = [a_job() for _ in range(4)]
    for job in jobs:
        await queue.enqueue(job, None)
    taken = await started(queue)
    claimed = await queue.read("w", 1)
    assert taken.job == jobs[0] and claimed and claimed[0].job_id == jobs[1].job_id
    server = redis_of(queue)
    await server.delete(LANE.ready("normal"))
    await server.zrem(f"{LANE.prefix}backlog:normal:default", jobs[2].job_id)
    mended = await mend(queue)
    assert {where for what, where in mended if what == "lost"} == {job.job_id for job in jobs[:3]}
    entries = await queue.read("w", 8) or []
    assert {entry.job_id for entry in entries} == {job.job_id for job in jobs}
    await mend(queue)  # counts that were taken while jobs were missing
    assert await mend(queue) == set()
    await server.aclose()


@on_a_lane
async def test_a_job_is_given_time_before_it_counts_as_lost(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None)
    server = redis_of(queue)
    await server.zrem(f"{LANE.prefix}waiting:normal", job.job_id)
    patient, tokens = reconciler(queue, missing_ms=600_000), ("tokens", "counts")
    assert await patient.look(queue, 60) == [tokens]
    assert await patient.look(queue, 60) == []
    await server.zadd(f"{LANE.prefix}waiting:normal", {job.job_id: 10**13})
    assert await patient.look(queue, 60) == [tokens]
    assert not await server.hexists(LANE.job(job.job_id), "missed")
    await server.aclose()


@on_a_lane
async def test_the_tokens_that_wait_are_counted_anew(queue: WorkerQueue) -> None:
    """In a lane that is never idle too, and whatever a job of theirs waits for."""
    server, job = redis_of(queue), a_job(prompts=[[7] * 100])
    fields = ({}, {"priority_class": "batch"}, {"delay_ms": 600_000}, {"background": True})
    for each in [job, *(a_job(prompts=[[7] * 10], **one) for one in fields)]:
        await queue.enqueue(each, None)
    taken = await started(queue)  # what a worker has waits no longer
    assert taken.job == job
    for drift in (100, -100, 7):
        assert (await queue.counts()).num_queued_tokens == 40
        assert await mend(queue) == set()
        await server.hincrby(f"{LANE.prefix}counts", "queued_tokens", drift)
        assert await mend(queue) == {("tokens", "counts")}
    await queue.release("w", [job.job_id])
    assert (await queue.counts()).num_queued_tokens == 40
    assert await mend(queue) == set()
    await server.aclose()


@on_a_lane
async def test_so_are_those_of_a_lane_where_nothing_waits(queue: WorkerQueue) -> None:
    server = redis_of(queue)
    await queue.enqueue(a_job(), None)
    await queue.cancel("default", (await started(queue)).job.job_id)
    await server.hset(f"{LANE.prefix}counts", "queued_tokens", 100)
    assert await mend(queue) == {("tokens", "counts")}
    assert (await queue.counts()).num_queued_tokens == 0
    await server.aclose()


@on_a_lane
async def test_a_leaked_slot_is_given_back_and_who_waited_for_it_runs(queue: WorkerQueue) -> None:
    job, server = a_job(), redis_of(queue)
    await queue.enqueue(job, None, account=ONE_AT_A_TIME)
    await server.hset(f"{LANE.prefix}account:acme", mapping={"running": 3, "queued": 7})
    assert await queue.read("w", 1) == []
    assert await mend(queue) == {("counts", "acme")}
    taken = await started(queue)
    assert await finish(queue, taken, deltas(job.job_id, 1))
    counts = await server.hmget(f"{LANE.prefix}account:acme", "running", "queued")
    assert counts == [b"0", b"0"]
    await server.aclose()


@on_a_lane
async def test_what_is_left_of_jobs_that_are_gone_goes_too(queue: WorkerQueue) -> None:
    server, gone, ended = redis_of(queue), a_job(), a_job()
    for job in (gone, ended):
        await queue.enqueue(job, None)
    await server.delete(LANE.job(gone.job_id))
    await server.hset(LANE.job("job_x"), "entry", "1-1")
    assert await mend(queue) | await mend(queue) == {  # an account may be counted before its ghosts
        ("ghost", gone.job_id),
        ("remnant", "job_x"),
        ("counts", "default"),
        ("tokens", "counts"),
    }
    assert await finish(queue, await started(queue), deltas(ended.job_id, 1))
    await server.persist(LANE.job(ended.job_id))
    assert await mend(queue) == {("no_ttl", ended.job_id)}
    assert await server.ttl(LANE.job(ended.job_id)) > 0
    await server.aclose()


@on_a_lane
async def test_other_lanes_and_models_with_odd_names_are_kept_apart(queue: WorkerQueue) -> None:
    other = WorkerQueue(queue.connection.redis, Lane("tin[y]*?"))
    server = redis_of(queue)
    for lane in (queue, other):
        await server.hset(lane.lane.job("job_x"), "entry", "1-1")
    assert await mend(other) == {("remnant", "job_x")}
    assert await mend(queue) == {("remnant", "job_x")}
    await server.aclose()


def test_a_busy_lane_is_left_as_it_is(redis_url: str) -> None:
    async def main() -> None:
        async with queue_at(redis_url) as queue, asyncio.timeout(100):
            workers = [ScriptedWorker(queue_of(queue), name, num_tokens=4) for name in "abc"]
            running = [asyncio.create_task(worker.run()) for worker in workers]
            jobs = [a_job(tenant=f"t{number % 5}", background=True) for number in range(300)]
            late = [a_job(delay_ms=1 + number, background=True) for number in range(50)]
            submitting = asyncio.create_task(submit(queue, jobs + late))
            mended, ended = list[tuple[str, str]](), 0
            while ended < len(jobs) + len(late):
                mended += await reconciler(queue).look(queue, 60)
                ended = (await queue.counts()).num_ended
                await queue.reap()
            await submitting
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            assert mended == []
            assert await reconciler(queue).look(queue, 60) == []

    asyncio.run(main())


def queue_of(queue: WorkerQueue) -> WorkerQueue:
    return WorkerQueue(queue.connection.redis, LANE)


async def submit(queue: WorkerQueue, jobs: list) -> None:  # type: ignore[type-arg]
    for number, job in enumerate(jobs):
        account = Account(name=f"k{number % 7}", limits=Quota(max_running=3))
        await queue.enqueue(job, None, account=account)
