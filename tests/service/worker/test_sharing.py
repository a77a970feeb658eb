"""Several workers of one lane: what waits is shared, and nobody with nothing to do waits for it."""

import asyncio
from collections import Counter

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, on_a_lane
from worker_process import WorkerProcess, ask

STEP_US = 10_000


async def workers(queue: WorkerQueue, *names: str) -> dict[str, WorkerQueue]:
    """A queue for each; all have looked for jobs, and have room for 64."""
    found = {name: WorkerQueue(queue.connection.redis, LANE) for name in names}
    for name, own in found.items():
        await own.register(name, WorkerCard(max_num_seqs=64))
        assert await own.read(name, 64, step_us=STEP_US) == []
    return found


async def put_in(queue: WorkerQueue, count: int) -> None:
    for _ in range(count):
        await queue.enqueue(a_job(), None, "d")


async def take(
    all_: dict[str, WorkerQueue], name: str, capacity: int = 64, step_us: int | None = STEP_US
) -> int:
    return len(await all_[name].read(name, capacity, step_us=step_us) or [])


@on_a_lane
async def test_idle_workers_take_equal_parts(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    await put_in(queue, 24)
    assert [await take(both, name) for name in "aabb"] == [12, 0, 12, 0]


@on_a_lane
async def test_what_waits_is_shared_however_large_a_batch_waits_too(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    for _ in range(200):
        await queue.enqueue(a_job(priority_class="batch"), None, "d")
    await put_in(queue, 24)
    taken = [
        Counter(one.ready for one in await own.read(name, 64, step_us=STEP_US, batch=2) or [])
        for name, own in both.items()
    ]
    assert [each["normal"] for each in taken] == [12, 12]
    assert all(each["batch"] <= 2 for each in taken)
    taken_later = [
        one.ready
        for own in both
        for one in await both[own].read(own, 64, step_us=STEP_US, batch=2) or []
    ]
    assert taken_later == ["batch"] * 4


@on_a_lane
async def test_who_has_less_in_work_takes_more(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    await put_in(queue, 10)
    assert await take(both, "a", step_us=None) == 10  # it leaves nothing
    assert await take(both, "b") == 0
    await put_in(queue, 14)
    assert [await take(both, name) for name in "aabb"] == [2, 0, 12, 0]


@on_a_lane
async def test_whose_steps_take_longer_takes_less(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    assert await take(both, "b", step_us=STEP_US * 3) == 0
    await put_in(queue, 24)
    assert [await take(both, "a"), await take(both, "b", step_us=STEP_US * 3)] == [18, 6]


@on_a_lane
async def test_no_more_is_left_to_others_than_they_have_room_for(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    assert await take(both, "b", capacity=3) == 0
    await put_in(queue, 24)
    assert [await take(both, name, capacity) for name, capacity in (("a", 64), ("b", 3))] == [21, 3]
    await put_in(queue, 24)
    assert await take(both, "a", capacity=43) == 24


@on_a_lane
async def test_what_others_leave_lying_is_taken_soon(queue: WorkerQueue) -> None:
    both = await workers(queue, "a", "b")
    await put_in(queue, 24)
    assert [await take(both, "a"), await take(both, "a")] == [12, 0]
    await both["a"].news(5000)  # nothing new comes: it knows when to look again
    assert await take(both, "a") == 12


@on_a_lane
async def test_nothing_is_left_to_who_drains_or_is_silent(queue: WorkerQueue) -> None:
    all_ = await workers(queue, "a", "drains", "silent")
    await all_["drains"].register("drains", WorkerCard(draining=True))
    key = f"{LANE.prefix}worker:silent"
    await queue.connection.call("HINCRBY", key, "stated_ms", -3000)
    await put_in(queue, 24)
    assert await take(all_, "a") == 24


@on_a_lane
async def test_a_worker_that_holds_nothing_takes_one_at_once(queue: WorkerQueue) -> None:
    both = await workers(queue, "slow", "fast")
    assert await take(both, "slow", step_us=STEP_US * 10**5) == 0
    await put_in(queue, 1)
    assert await take(both, "slow", step_us=STEP_US * 10**5) == 1


def test_a_worker_with_jobs_leaves_new_ones_to_one_without(redis_url: str) -> None:
    flags = "--fake-step-ms", "20"
    params = SamplingParams(max_tokens=2000, ignore_eos=True)

    async def put_in(client: QueueClient, name: str) -> list[str]:
        texts = [f"{name} {number}" for number in range(24)]
        return [await client.enqueue(each, params=params, background=True) for each in texts]

    async def holders(client: QueueClient, ids: list[str]) -> Counter[str]:
        """How many of these jobs each worker has, once all are in work."""
        while True:
            statuses = [await client.status(job_id) for job_id in ids]
            if all(status.worker for status in statuses):
                return Counter(str(status.worker) for status in statuses)

    async def both_looked(client: QueueClient) -> None:
        redis, prefix = plain(client.redis), Lane("fake").prefix
        names = [name.decode() for name in await redis.zrange(f"{prefix}workers", 0, -1)]
        while not all([await redis.hexists(f"{prefix}worker:{name}", "room") for name in names]):
            await asyncio.sleep(0.02)

    async def asks(client: QueueClient) -> None:
        first = await put_in(client, "first")
        [(one, count)] = (await holders(client, first)).items()
        assert count == 24
        with WorkerProcess(redis_url, "fake", *flags) as other:
            other.ready()
            await both_looked(client)
            second = await put_in(client, "second")
            assert (await holders(client, second))[one] < 12  # an equal part
            for job_id in first + second:
                await client.cancel(job_id)

    with WorkerProcess(redis_url, "fake", *flags) as worker:
        worker.ready()
        ask(redis_url, asks)
