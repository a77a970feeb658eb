"""A new version takes over: jobs go on where they were, and never with another model's tokens."""

import asyncio

import pytest
from test_blame import redis_of, step

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Failed
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from plain import plain
from scripted import LANE, a_job, finish, on_a_lane, started
from worker_process import WorkerProcess, ask, same

OLD, NEW = WorkerCard(fingerprint="old"), WorkerCard(fingerprint="new")


@on_a_lane
async def test_a_job_with_tokens_waits_for_the_model_that_made_them(queue: WorkerQueue) -> None:
    fresh, begun = a_job(background=True), a_job(background=True)
    await queue.register("old", OLD)
    await queue.enqueue(begun, None)
    taken = await started(queue, "old")
    await step(queue, "old", taken, 3)
    await queue.release("old", [begun.job_id])
    await queue.enqueue(fresh, None)
    await queue.unregister("old")
    await queue.register("new", NEW)
    for entry in await queue.read("new", 4) or []:
        got = await queue.start("new", entry)
        assert (got is not None) == (entry.job_id == fresh.job_id)
    assert await queue.read("new", 4) == []
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running) == (1, 1)
    await redis_of(queue).zadd(f"{LANE.prefix}foreign", {begun.job_id: 1})
    await queue.register("old again", OLD)
    await queue.sweep()  # its model is served: it waits on
    taken = await started(queue, "old again")
    assert taken.job == begun and taken.position == 3
    assert await finish(queue, taken, taken.log, "old again")
    assert await redis_of(queue).exists(f"{LANE.prefix}foreign", f"{LANE.prefix}foreign:old") == 0


@on_a_lane
async def test_where_its_model_is_gone_it_ends_and_says_so(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.register("old", OLD)
    await queue.enqueue(job, None)
    await step(queue, "old", await started(queue, "old"))
    await queue.unregister("old")
    await queue.register("new", NEW)
    [entry] = await queue.read("new", 4) or []
    assert await queue.start("new", entry) is None
    await queue.sweep()
    assert (await queue.status("default", job.job_id)).state == "ready"
    await redis_of(queue).zadd(f"{LANE.prefix}foreign", {job.job_id: 1})
    await queue.sweep()
    end = (await queue.attach("default", job.job_id, "c", 0)).events[-1]
    assert isinstance(end, Failed) and (end.state, end.position) == ("failed", 1)
    assert (end.error.code, end.error.status, end.error.retryable) == ("model_changed", 503, True)
    assert (await queue.counts()).num_queued == 0


@on_a_lane
async def test_without_a_token_any_model_will_do(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.register("old", OLD)
    await queue.enqueue(job, None)
    await started(queue, "old")
    await queue.unregister("old")
    await queue.register("new", NEW)
    assert (await started(queue, "new")).job == job


@pytest.mark.slow
def test_a_job_that_is_being_started_is_handed_back(redis_url):
    """Its prompt takes a while to be read, and the worker ends meanwhile."""
    worker = WorkerProcess(redis_url, BUNDLED_DRAFT, "--drain-s", "0", "--lease-ttl-ms", "60000")

    async def asks(client: QueueClient) -> None:
        job_id = await client.enqueue("A long story. " * 100_000, background=True)
        while (await client.status(job_id)).state == "ready":
            await asyncio.sleep(0.01)
        assert (await client.status(job_id)).state == "admitting"
        assert await asyncio.to_thread(worker.stop) == 0
        assert (await client.status(job_id)).state == "ready"
        counts = await plain(client.redis).hgetall(f"{Lane(BUNDLED_DRAFT.name).prefix}counts")
        assert b"reaped" not in counts

    try:
        worker.ready()
        ask(redis_url, asks)
    finally:
        worker.kill()


@pytest.mark.slow
def test_a_rolling_restart_under_load_is_not_seen(redis_url, offline):
    """Three workers, one after another: equal texts; all is handed back, nothing reaped."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
    prompts = [f"story {number}" for number in range(8)]
    expected = offline.generate(prompts, [params] * len(prompts))
    flags = ("--drain-s", "0", "--fake-step-ms", "20", "--lease-ttl-ms", "60000")
    workers = [WorkerProcess(redis_url, "fake", *flags) for _ in range(3)]
    is_over = asyncio.Event()

    async def load(client: QueueClient) -> int:
        """Wave after wave, until all are replaced; how many jobs it was."""
        count = 0
        while not is_over.is_set():
            jobs = [await client.enqueue(text, params=params, background=True) for text in prompts]
            for job_id, output in zip(jobs, expected, strict=True):
                same(await client.result(job_id), output)
            count += len(jobs)
        return count

    try:

        async def asks(client: QueueClient) -> None:
            await asyncio.to_thread(workers[0].ready)
            loads = [asyncio.create_task(load(client)) for _ in range(3)]
            for old in workers[:3]:
                await asyncio.to_thread(old.ready)
                workers.append(WorkerProcess(redis_url, "fake", *flags))
                await asyncio.to_thread(workers[-1].ready)
                assert await asyncio.to_thread(old.stop) == 0
            is_over.set()
            num_jobs = sum(await asyncio.gather(*loads))
            counts = await plain(client.redis).hgetall(f"{Lane('fake').prefix}counts")
            assert int(counts[b"ended"]) == num_jobs
            assert {b"reaped", b"lapsed", b"crashed"}.isdisjoint(counts)

        ask(redis_url, asks)
        assert "handed back" in "".join(worker.logged() for worker in workers[:3])
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
