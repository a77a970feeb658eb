"""Keys that must live and die together: where one of them is gone, so is what both stood for."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import Commit, JobSignal
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.llm import LLM
from plain import plain
from scripted import LANE, a_job, delta, finish, on_a_lane, started
from worker_process import WorkerProcess, ask, incarnations, same, until

RECORD = f"{LANE.prefix}worker:w"


async def beat(queue: WorkerQueue) -> bool:
    return await queue.beat("w", {"num_running": 1}) is None


async def read(queue: WorkerQueue) -> bool:
    return await queue.read("w", 1) is None


async def tell(queue: WorkerQueue) -> bool:
    return not await queue.tell("w", "drain")


CALLS = (beat, read, tell)


@pytest.mark.parametrize("call", CALLS)
def test_a_lease_without_its_record_is_none(redis_url, call: Callable[..., Awaitable[bool]]):
    """No script makes half a record, and the name has no lease either."""

    @on_a_lane
    async def scenario(queue: WorkerQueue) -> None:
        redis = plain(queue.connection.redis)
        await redis.delete(RECORD)
        assert await call(queue)
        assert not await redis.exists(RECORD)
        assert await queue.workers() == []

    scenario(redis_url)


@on_a_lane
async def test_jobs_of_a_worker_without_a_record_go_on_and_none_is_blamed(
    queue: WorkerQueue,
) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    taken = await started(queue)
    redis = plain(queue.connection.redis)
    await redis.delete(RECORD)
    commit = Commit(job.job_id, taken.epoch, [delta(job.job_id, 0)])
    assert await queue.commit("w", [commit]) == {job.job_id: JobSignal.FENCE}
    assert not await finish(queue, taken, [])
    assert not await redis.exists(RECORD)
    assert await queue.reap() == 1
    await queue.register("other", WorkerCard())
    assert (await started(queue, "other")).trial is None
    assert not await redis.hexists(LANE.job(job.job_id), "crashes")


@on_a_lane
async def test_a_claim_of_a_worker_without_a_record_is_not_started(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    [entry] = await queue.read("w", 1) or []
    await plain(queue.connection.redis).delete(RECORD)
    assert await queue.start("w", entry) is None
    assert await queue.reap() == 1
    assert (await queue.status("default", job.job_id)).state == "ready"


@on_a_lane
async def test_a_record_lives_as_long_as_its_lease(queue: WorkerQueue) -> None:
    redis = plain(queue.connection.redis)
    await queue.beat("w")
    assert await redis.ttl(RECORD) == -1
    await redis.zadd(f"{LANE.prefix}workers", {"w": 1})
    await queue.reap()
    assert not await redis.exists(RECORD)


@on_a_lane
async def test_a_job_set_aside_is_found_again_where_its_set_is_gone(queue: WorkerQueue) -> None:
    await queue.register("w", WorkerCard(fingerprint="new"))
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    redis, foreign = plain(queue.connection.redis), f"{LANE.prefix}foreign"
    await redis.hset(LANE.job(job.job_id), mapping={"fingerprint": "old", "position": 3})
    assert await queue.start("w", (await queue.read("w", 1) or [])[0]) is None
    await redis.delete(f"{foreign}:old")
    await redis.zadd(foreign, {job.job_id: 1})
    await queue.register("back", WorkerCard(fingerprint="old"))
    await queue.sweep()
    assert [entry.job_id for entry in await queue.read("back", 1) or []] == [job.job_id]


@on_a_lane
async def test_a_job_submitted_again_whose_record_vanished_begins_anew(queue: WorkerQueue) -> None:
    """What is left of its old log and result is no part of it."""
    job = a_job(background=True)
    redis, key = plain(queue.connection.redis), LANE.job(job.job_id)
    await queue.enqueue(job, None, "d")
    assert await finish(queue, await started(queue), [delta(job.job_id, 0)])
    await redis.delete(key)
    await queue.enqueue(job, None, "d")
    assert not await redis.exists(f"{key}:log", f"{key}:result")
    again = await started(queue)
    assert again.log == []
    assert await finish(queue, again, [delta(job.job_id, 0)])


@pytest.mark.slow
def test_a_worker_whose_record_vanishes_registers_anew(redis_url):
    """What begins after that, and meets a crash, goes on."""
    story = SamplingParams(max_tokens=120, seed=1, ignore_eos=True)
    offline = LLM("fake", load_format="fake", fake_step_ms=0)
    with WorkerProcess(redis_url, "fake", "--fake-step-ms", "20") as worker:
        worker.ready()
        [name] = incarnations(redis_url)

        async def asks(client: QueueClient) -> None:
            await plain(client.redis).delete(f"{Lane('fake').prefix}worker:{name}")
            await asyncio.sleep(0.5)
            job_id = await client.enqueue("long", params=story, background=True)
            while (await client.status(job_id)).num_tokens < 20:
                await asyncio.sleep(0.02)
            os.kill(worker.child("penstock.worker.engine_process"), signal.SIGKILL)
            same(await client.result(job_id), offline.generate("long", story)[0])

        ask(redis_url, asks, 100)
        until(lambda: incarnations(redis_url) not in ({name}, set()), "a new name")
