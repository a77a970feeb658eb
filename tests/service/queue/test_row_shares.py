"""A full worker is given one job of a tenant that has less than its share, and waited."""

import asyncio
from collections.abc import Mapping

import pytest
from test_reconcile import mend
from test_scripts import redis_of

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Entry, HeldRows
from penstock.schemas.job import Job, QueueClass
from penstock.schemas.queue.worker_queue import WorkerQueue
from scripted import LANE, a_job, deltas, finish, on_a_lane, started

BOUND_S = 1.1  # for so long a job waits for others' rows


def full(most: str, /, weight: float = 1, **rows: int) -> dict[QueueClass, HeldRows]:
    return {"normal": HeldRows(most, weight, rows)}


async def put_in(
    queue: WorkerQueue, tenant: str, count: int, weight: float = 1, **more: object
) -> list[Job]:
    jobs = [a_job(tenant=tenant, **more) for _ in range(count)]
    for job in jobs:
        account = Account(name=tenant, limits=Quota(weight=weight))
        await queue.enqueue(job, None, account=account)
    return jobs


async def read_full(
    queue: WorkerQueue, held_rows: Mapping[QueueClass, HeldRows], count: int = 16
) -> list[str]:
    entries = await queue.read("w", count, down_to="text", step_us=1, held_rows=held_rows)
    for entry in entries or []:
        assert await queue.start("w", entry) is not None
    return [entry.job_id for entry in entries or []]


async def claimed(queue: WorkerQueue, tenant: str, count: int, weight: float = 1) -> list[Entry]:
    await put_in(queue, tenant, count, weight)
    entries = await queue.read("w", count) or []
    assert len(entries) == count
    return entries


@on_a_lane
async def test_it_waits_for_a_bound_and_one_is_given_at_a_time(queue: WorkerQueue) -> None:
    await claimed(queue, "a", 4)
    await put_in(queue, "a", 3)
    of_b = await put_in(queue, "b", 3)
    held_rows = full("a", a=4)
    assert await read_full(queue, held_rows) == []
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, {}) == []
    assert await read_full(queue, held_rows) == [of_b[0].job_id]
    assert await read_full(queue, full("a", a=3, b=1)) == [of_b[1].job_id]
    assert await read_full(queue, full("a", a=2, b=2)) == []


@pytest.mark.parametrize(
    ("weight", "rows", "is_given"),
    [
        (1, {"a": 4}, True),
        (1, {"a": 2}, True),
        (1, {"a": 1}, False),
        (1, {"a": 3, "b": 1}, True),
        (1, {"a": 2, "b": 1}, False),
        (3, {"a": 3, "b": 3}, True),
        (0.25, {"a": 4}, False),
    ],
)
def test_it_is_given_down_to_equal_shares(redis_url, weight, rows, is_given):
    @on_a_lane
    async def scenario(queue: WorkerQueue) -> None:
        await claimed(queue, "a", 9)
        [job] = await put_in(queue, "b", 1, weight)
        await asyncio.sleep(BOUND_S)
        assert await read_full(queue, full("a", **rows)) == [job.job_id] * is_given

    scenario(redis_url)


@on_a_lane
async def test_who_has_its_share_at_other_workers_gets_no_more_here(queue: WorkerQueue) -> None:
    held = [*await claimed(queue, "a", 4), *await claimed(queue, "b", 4)]
    [job] = await put_in(queue, "b", 1)
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4)) == []
    for entry in held[4:7]:
        taken = await queue.start("w", entry)
        assert await finish(queue, taken, deltas(entry.job_id, 1))
    assert await read_full(queue, full("a", a=4)) == [job.job_id]


@on_a_lane
async def test_rows_may_be_of_jobs_of_another_lane(queue: WorkerQueue) -> None:
    [job] = await put_in(queue, "b", 1)
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4)) == [job.job_id]


@on_a_lane
async def test_jobs_of_a_batch_take_no_part_in_it(queue: WorkerQueue) -> None:
    await claimed(queue, "a", 4)
    await put_in(queue, "b", 9, priority_class="batch")
    assert len(await queue.read("w", 8) or []) == 8
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4)) == []
    [job] = await put_in(queue, "b", 1)
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4)) == [job.job_id]


@on_a_lane
async def test_texts_go_first_and_the_class_is_kept(queue: WorkerQueue) -> None:
    await claimed(queue, "a", 4)
    [high] = await put_in(queue, "b", 1, priority_class="high")
    [normal] = await put_in(queue, "b", 1)
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4)) == [normal.job_id]
    held_rows = full("a", a=4, b=1) | {"high": HeldRows("a", 1, {"a": 4, "b": 1})}
    assert await read_full(queue, held_rows) == [high.job_id]


@on_a_lane
async def test_it_is_found_behind_others_that_have_their_share(queue: WorkerQueue) -> None:
    """By shares, not by turns."""
    for tenant in ("a", "c"):
        await claimed(queue, tenant, 4)
        await put_in(queue, tenant, 4)
    [job] = await put_in(queue, "b", 1)
    await redis_of(queue).zadd(f"{LANE.prefix}fair:normal", {"b": 1e9})
    await redis_of(queue).set(f"{LANE.prefix}served:normal:b", 1e9)
    await asyncio.sleep(BOUND_S)
    assert await read_full(queue, full("a", a=4, c=4)) == [job.job_id]


@on_a_lane
async def test_what_is_counted_of_tenants_ends_with_their_jobs_and_is_mended(
    queue: WorkerQueue,
) -> None:
    server = redis_of(queue)
    key = f"{LANE.prefix}running"
    [job] = await put_in(queue, "b", 1)
    taken = await started(queue)
    assert await server.hgetall(key) == {b"b": b"1"}
    await server.hset(key, mapping={"b": 7, "gone": 2})
    await mend(queue)
    assert await server.hgetall(key) == {b"b": b"1"}
    assert await finish(queue, taken, deltas(job.job_id, 1))
    assert await server.hgetall(key) == {}
    await server.aclose()
