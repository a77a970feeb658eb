"""Redis's clock an hour back, as after a failover to one that was behind: nothing waits for it."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Outcome
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis import script
from plain import plain
from scripted import LANE, a_job, on_a_lane, started

HOUR_MS = 3_600_000
CLOCK = "test:clock"  # milliseconds that the server's is wrong
TRUE_TIME = "local time = redis.call('TIME')\n"
WRONG_TIME = f"time[1] = time[1] + math.floor((redis.call('GET', '{CLOCK}') or 0) / 1000)\n"


@pytest.fixture(autouse=True)
def a_clock_that_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> Iterator[None]:
    """The scripts as they are, but for the time that they are told."""
    scripts = tmp_path / "scripts"
    shutil.copytree(script.SCRIPTS, scripts)
    lane = scripts / "shared" / "lane.lua"
    assert TRUE_TIME in lane.read_text()
    lane.write_text(lane.read_text().replace(TRUE_TIME, TRUE_TIME + WRONG_TIME))
    monkeypatch.setattr(script, "SCRIPTS", scripts)
    script.script_text.cache_clear()
    script._parts.cache_clear()
    yield
    script.script_text.cache_clear()
    script._parts.cache_clear()


async def set_back(queue: WorkerQueue) -> None:
    await plain(queue.connection.redis).set(CLOCK, -HOUR_MS)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await is_so():
            await asyncio.sleep(0.05)


@on_a_lane
async def test_a_dead_workers_jobs_are_handed_on_within_a_lease(queue: WorkerQueue) -> None:
    other = WorkerQueue(queue.connection.redis, LANE, lease_ms=500)
    await other.register("dead", WorkerCard())
    await queue.enqueue(a_job(), None, "d")
    await started(other, "dead")
    await set_back(queue)
    await queue.register("w", WorkerCard())

    async def is_handed_on() -> bool:
        await queue.beat("w")
        await queue.reap()
        return (await queue.counts()).num_queued == 1

    # The longest lease on the lane is 5 s: a dead worker has no shorter one than that now.
    await until(is_handed_on)


@on_a_lane
async def test_a_job_that_nobody_listens_to_ends(queue: WorkerQueue) -> None:
    queue.orphan_grace_ms = 500
    job = a_job()
    await queue.enqueue(job, "nobody", "d")
    await set_back(queue)

    async def is_cancelled() -> bool:
        await queue.sweep()
        return (await queue.status("default", job.job_id)).state == "cancelled"

    await until(is_cancelled)


@on_a_lane
async def test_a_job_of_another_model_ends_where_none_has_it(queue: WorkerQueue) -> None:
    await queue.register("w", WorkerCard(fingerprint="new"))
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    redis = plain(queue.connection.redis)
    await redis.hset(LANE.job(job.job_id), mapping={"fingerprint": "old", "position": 3})
    assert await queue.start("w", (await queue.read("w", 1) or [])[0]) is None  # set aside
    await set_back(queue)
    await queue.sweep()
    latest = await redis.zscore(f"{LANE.prefix}foreign", job.job_id)
    now_s, _ = await redis.time()
    assert latest is not None and latest < now_s * 1000 - HOUR_MS + 60_000


@on_a_lane
async def test_a_suspect_is_tried(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    await queue.register("a", WorkerCard())
    await started(queue, "a")
    await queue.unregister("a", crashed=True)
    await plain(queue.connection.redis).set(f"{LANE.prefix}trier", "gone", px=HOUR_MS)
    await set_back(queue)
    await queue.register("w", WorkerCard())

    async def is_asked() -> bool:
        assert await queue.read("w", 1) == []
        return queue.must_be_empty

    await until(is_asked)


@on_a_lane
async def test_what_waits_too_long_goes_a_class_up_all_the_same(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(priority_class="normal"), None, "d")
    await set_back(queue)
    assert await queue.read("w", 0) == []
    redis = plain(queue.connection.redis)
    [(_, at)] = await redis.zrange(f"{LANE.prefix}waiting:normal", 0, -1, withscores=True)
    now_s, _ = await redis.time()
    assert at < now_s * 1000 - HOUR_MS + 70_000


@on_a_lane
async def test_an_account_at_its_rate_is_not_kept_for_the_hour(queue: WorkerQueue) -> None:
    account = Account(name="t", limits=Quota(requests_per_minute=1))
    jobs = [a_job(tenant="t", over_limit="wait") for _ in range(2)]
    for job in jobs:
        answer = await queue.enqueue(job, None, "d", account=account)
        assert answer.outcome is Outcome.ACCEPTED
    assert len(await queue.read("w", 2) or []) == 1
    await set_back(queue)
    await queue.register("w", WorkerCard())

    async def is_read() -> bool:
        await queue.connection.run("housekeeping/mend", LANE.prefix, "0", 1000, 60_000)
        return bool(await queue.read("w", 1))

    await until(is_read)
