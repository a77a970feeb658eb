"""Each transition of a job, alone. `test_queue_machine` has them meet."""

import asyncio
import json
import re

import pytest

from penstock.schemas.delivery import Commit, Ending, Entry, JobSignal, Outcome
from penstock.schemas.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidJob,
    JobGone,
    JobNotFound,
    QueueFull,
)
from penstock.schemas.event import Delta, Done, Event, Failed, Usage
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.queue import PAGE_BYTES
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.link import Reply, Word
from penstock.schemas.redis.script import SCRIPTS
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import parse
from penstock.schemas.result import after
from plain import plain
from scripted import LANE, a_job, delta, deltas, done, finish, on_a_lane, redis_of, started

# Redis 6.2's, as far as the scripts need them.
COMMANDS = """
DEL EXISTS EXPIRE GET GETRANGE HDEL HEXISTS HGET HGETALL HINCRBY HKEYS HMGET HSET HSETNX HSTRLEN
INCR INCRBYFLOAT LLEN LRANGE LTRIM PERSIST PEXPIRE PEXPIREAT PTTL PUBLISH PUBSUB RPUSH SADD SCAN
SCARD SET SETRANGE SISMEMBER SMEMBERS SRANDMEMBER SREM STRLEN TIME TTL XACK XADD XDEL XGROUP XINFO
XLEN XPENDING XRANGE XREADGROUP XREVRANGE ZADD ZCARD ZCOUNT ZRANGE ZRANGEBYSCORE ZRANK ZREM
ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZSCORE
"""


async def keys_of(queue: WorkerQueue, job_id: str) -> set[str]:
    return {key.decode() for key in await redis_of(queue).keys(f"*{job_id}*")}


async def lapse(queue: WorkerQueue, worker: str) -> None:
    """What time would do to a lease that nobody renews."""
    await redis_of(queue).zadd(f"{LANE.prefix}workers", {worker: 1})


async def log_of(queue: WorkerQueue, job_id: str) -> list[tuple[str, dict[str, object]]]:
    lines = await redis_of(queue).xrange(f"{LANE.job(job_id)}:log")
    return [(entry.decode(), json.loads(fields[b"e"])) for entry, fields in lines]


def test_the_scripts_keep_to_the_commands_of_redis_6_2() -> None:
    for path in SCRIPTS.rglob("*.lua"):
        calls = re.findall(r"redis\.p?call\(\s*(.\w*)", path.read_text())
        assert {call[1:] for call in calls if call[0] == "'"} <= set(COMMANDS.split()), path


@on_a_lane
async def test_jobs_come_handed_back_first_then_by_class_and_never_too_many(
    queue: WorkerQueue,
) -> None:
    jobs = [a_job(priority_class=name) for name in ("normal", "batch", "high", "normal")]
    for job in jobs:
        await queue.enqueue(job, None, "d")
    first, second = await started(queue), await started(queue)
    assert (first.job, second.job) == (jobs[2], jobs[0])
    assert await queue.release("w", [first.job.job_id, second.job.job_id]) == 2
    reads = [await queue.read("w", 1) or [] for _ in range(4)]
    ids = [[entry.job_id for entry in entries] for entries in reads]
    assert ids == [[jobs[at].job_id] for at in (2, 0, 3, 1)]
    assert await queue.read("w", 8) == []
    for name in ("high", "normal", "normal", "batch"):
        await queue.enqueue(a_job(priority_class=name), None, "d")
    entries = await queue.read("w", 2) or []
    assert [entry.ready for entry in entries] == ["high", "normal"]


@on_a_lane
async def test_a_number_orders_an_accounts_jobs_within_their_class(queue: WorkerQueue) -> None:
    numbers = {"a": 9, "b": 1, "c": 0, "d": -5, "e": 1, "f": 10**15, "g": 10**9, "h": -(2**50)}
    for name, number in numbers.items():
        timed = {"timeout_ms": 60_000} if name == "a" else {}
        await queue.enqueue(a_job(metadata={"name": name}, priority=number, **timed), None, "d")
    await queue.enqueue(a_job(metadata={"name": "high"}, priority_class="high", priority=9), None)
    late = a_job(metadata={"name": "late"}, priority=1, not_before_ms=1)
    await queue.enqueue(late, None)
    other = a_job(metadata={"name": "other"}, tenant="other", priority=99)
    await queue.enqueue(other, None)
    names = [(await started(queue)).job.metadata["name"] for _ in range(11)]
    names.remove("other")  # tenants take turns
    assert "".join(names) == "highhdcbelateafg"


@on_a_lane
async def test_a_waiting_read_wakes_at_once_and_takes_no_more_than_it_may(
    queue: WorkerQueue,
) -> None:
    async def wait_and_read() -> list[Entry] | None:
        assert await queue.read("w", 2) == []
        await queue.news(2000)
        return await queue.read("w", 2)

    reading = asyncio.create_task(wait_and_read())
    await asyncio.sleep(0.05)
    producer = WorkerQueue(queue.connection.redis, LANE)
    for name in ("batch", "normal", "high", "high", "normal"):
        await producer.enqueue(a_job(priority_class=name), None, "d")
    async with asyncio.timeout(120):
        entries = await reading
    assert entries is not None and 1 <= len(entries) <= 2
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running) == (5 - len(entries), len(entries))


@on_a_lane
async def test_a_second_submission_is_the_same_job_or_refused(queue: WorkerQueue) -> None:
    job = a_job()
    assert (await queue.enqueue(job, None, "d")).outcome is Outcome.ACCEPTED
    assert (await queue.enqueue(job, None, "d")).outcome is Outcome.DUPLICATE
    assert (await queue.enqueue(job, None, "other")).outcome is Outcome.MISMATCH
    foreign = job.model_copy(update={"tenant": "another"})
    assert (await queue.enqueue(foreign, None, "d")).outcome is Outcome.MISMATCH
    taken = await started(queue)
    await finish(queue, taken, deltas(job.job_id, 2))
    assert (await queue.enqueue(job, None, "d")).outcome is Outcome.DUPLICATE
    assert (await queue.counts()).num_queued == 0


@on_a_lane
async def test_a_full_queue_says_so_and_when_to_come_back(queue: WorkerQueue) -> None:
    for _ in range(3):
        assert (await queue.enqueue(a_job(), None, "d", max_queued=3)).outcome is Outcome.ACCEPTED
    refused = await queue.enqueue(a_job(), None, "d", max_queued=3)
    assert refused.outcome is Outcome.FULL
    assert refused.num_queued == 3 and refused.retry_after_ms >= 100
    await started(queue)
    assert (await queue.enqueue(a_job(), None, "d", max_queued=3)).outcome is Outcome.ACCEPTED


@on_a_lane
async def test_without_a_worker_only_background_jobs_wait(queue: WorkerQueue) -> None:
    await lapse(queue, "w")
    assert (await queue.enqueue(a_job(), None, "d")).outcome is Outcome.NO_WORKER
    assert (await queue.enqueue(a_job(background=True), None, "d")).outcome is Outcome.ACCEPTED


@on_a_lane
async def test_a_submission_that_could_not_be_kept_is_refused(queue: WorkerQueue) -> None:
    for job, reply_to, digest in (
        (a_job(job_id="job 1"), None, "d"),
        (a_job(), "two\nlines", "d"),
        (a_job(), None, ""),
        (a_job(tenant=""), None, "d"),
    ):
        with pytest.raises(InvalidJob):
            await queue.enqueue(job, reply_to, digest)
    assert await redis_of(queue).keys("*:job:*") == []


@on_a_lane
async def test_a_commit_is_logged_then_published_once_a_channel(queue: WorkerQueue) -> None:
    jobs = [a_job() for _ in range(70)]
    async with redis_of(queue).pubsub() as pubsub:
        await pubsub.subscribe(LANE.inbox("r"))
        await pubsub.get_message(timeout=120)
        for job in jobs:
            await queue.enqueue(job, LANE.inbox("r"), "d")
        taken = [await started(queue) for _ in jobs]
        commits = [Commit(one.job.job_id, one.epoch, deltas(one.job.job_id, 1, 2)) for one in taken]
        signals = await queue.commit("w", commits)
        messages = [await pubsub.get_message(timeout=120) for _ in range(2)]
        assert await pubsub.get_message(timeout=0.05) is None
    assert signals == {job.job_id: JobSignal.KEEP for job in jobs}
    lines = [
        json.loads(line) for message in messages if message for line in message["data"].split(b"\n")
    ]
    assert len(lines) == 140
    for job in jobs:
        log = await log_of(queue, job.job_id)
        assert [entry for entry, _ in log] == ["1-0", "1-1"]
        assert [line["event"] for line in lines if line["job_id"] == job.job_id] == [
            event for _, event in log
        ]


@on_a_lane
async def test_a_repeated_commit_adds_nothing_and_a_longer_one_only_what_is_new(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    made = deltas(taken.job.job_id, 2, 1, 3)
    for sent, signal in (
        (made[:2], JobSignal.KEEP),
        (made[:2], JobSignal.DUPLICATE),
        (made, JobSignal.KEEP),
    ):
        commit = Commit(taken.job.job_id, taken.epoch, sent)
        assert await queue.commit("w", [commit]) == {taken.job.job_id: signal}
    page = await queue.attach("default", taken.job.job_id, "r", 0)
    assert page.events == made


@on_a_lane
async def test_a_commit_that_does_not_continue_the_log_gives_the_job_to_another(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    job_id = taken.job.job_id
    await queue.commit("w", [Commit(job_id, taken.epoch, deltas(job_id, 2))])
    gap = Commit(job_id, taken.epoch, [delta(job_id, 3)])
    straddle = Commit(job_id, taken.epoch, [delta(job_id, 1, 2)])
    assert await queue.commit("w", [gap]) == {job_id: JobSignal.FENCE}
    again = await started(queue)
    assert (again.epoch, again.log) == (2, deltas(job_id, 2))
    assert await queue.commit("w", [straddle]) == {job_id: JobSignal.FENCE}
    assert (await queue.counts()).num_running == 1


@on_a_lane
async def test_the_next_lapse_is_that_of_the_oldest_lease(queue: WorkerQueue) -> None:
    patient = WorkerQueue(queue.connection.redis, LANE, lease_ms=600_000)
    await patient.register("new", WorkerCard())
    left_ms = await queue.next_lapse_ms()
    assert left_ms is not None and 0 < left_ms <= queue.lease_ms
    await lapse(queue, "w")
    assert await queue.next_lapse_ms() == 0
    await queue.reap()
    left_ms = await queue.next_lapse_ms()
    assert left_ms is not None and left_ms > queue.lease_ms
    await lapse(queue, "new")
    await queue.reap()
    assert await queue.next_lapse_ms() is None


@on_a_lane
async def test_who_lost_a_job_can_write_nothing_more(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    old = await started(queue)
    job_id, made = old.job.job_id, deltas(old.job.job_id, 2, 1)
    await queue.commit("w", [Commit(job_id, old.epoch, made[:1])])
    await lapse(queue, "w")
    await queue.register("v", WorkerCard())
    assert await queue.reap() == 1
    late = Commit(job_id, old.epoch, made[1:])
    for stage in ("queued", "taken up"):
        if stage == "taken up":
            new = await started(queue, "v")
        assert await queue.commit("w", [late]) == {job_id: JobSignal.FENCE}
        assert await queue.commit("v", [late]) == {job_id: JobSignal.FENCE}
        assert not await finish(queue, old, made)
        assert await queue.release("w", [job_id]) == 0
    assert (await queue.beat("w"), await queue.read("w", 1)) == (None, None)
    assert new.log == made[:1]
    await queue.register("u", WorkerCard())
    for epoch in (old.epoch, new.epoch):
        stray = Commit(job_id, epoch, made[1:])
        assert await queue.commit("u", [stray]) == {job_id: JobSignal.FENCE}
    assert await finish(queue, new, made, "v")
    assert not await finish(queue, old, made)
    late = Commit(job_id, new.epoch, [delta(job_id, 3)])
    assert await queue.commit("v", [late]) == {job_id: JobSignal.FENCE}
    assert [entry for entry, _ in await log_of(queue, job_id)] == ["1-0", "2-2", "2-3"]


@on_a_lane
async def test_the_same_worker_is_fenced_under_its_older_epoch(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    old = await started(queue)
    await queue.release("w", [old.job.job_id])
    assert await redis_of(queue).hget(LANE.job(old.job.job_id), "owner") is None
    new = await started(queue)
    stale = Commit(old.job.job_id, old.epoch, deltas(old.job.job_id, 1))
    assert await queue.commit("w", [stale]) == {old.job.job_id: JobSignal.FENCE}
    assert not await finish(queue, old, deltas(old.job.job_id, 1))
    assert new.epoch == old.epoch + 1 and new.log == []


@on_a_lane
async def test_a_lapsed_lease_that_nobody_reaped_is_still_good(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    await lapse(queue, "w")
    commit = Commit(taken.job.job_id, taken.epoch, deltas(taken.job.job_id, 1))
    assert await queue.commit("w", [commit]) == {taken.job.job_id: JobSignal.KEEP}
    assert await queue.reap() == 0


@on_a_lane
async def test_a_finished_job_is_gone_from_the_lane_and_all_its_keys_expire(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(timeout_ms=60_000), None, "d", result_ttl_s=100)
    taken = await started(queue)
    job_id, made = taken.job.job_id, deltas(taken.job.job_id, 2, 1)
    await queue.commit("w", [Commit(job_id, taken.epoch, made[:1])])
    for _ in range(2):
        assert await finish(queue, taken, made)
    ttls = {key: await redis_of(queue).ttl(key) for key in await keys_of(queue, job_id)}
    key = LANE.job(job_id)
    assert ttls == {
        key: pytest.approx(200, abs=5),
        f"{key}:log": pytest.approx(60, abs=5),
        f"{key}:result": pytest.approx(100, abs=5),
    }
    assert len(await log_of(queue, job_id)) == 3
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running, counts.num_ended) == (0, 0, 1)
    for name in ("orphans", "deadlines"):
        assert await redis_of(queue).zcard(f"{LANE.prefix}{name}") == 0
    for name in ("resume", "high", "normal", "batch"):
        assert await redis_of(queue).xlen(LANE.ready(name)) == 0


@on_a_lane
async def test_a_job_is_cancelled_where_it_is(queue: WorkerQueue) -> None:
    queued, claimed, running = a_job(), a_job(priority_class="high"), a_job(priority_class="high")
    for job in (running, claimed, queued):
        await queue.enqueue(job, None, "d")
    taken = await started(queue)
    entries = await queue.read("w", 1) or []
    assert [(taken.job, entries[0].job_id)] == [(running, claimed.job_id)]
    assert (await queue.cancel("default", queued.job_id)).state == "cancelled"
    assert (await queue.cancel("default", claimed.job_id)).state == "cancelled"
    assert await queue.start("w", entries[0]) is None
    assert (await queue.cancel("default", running.job_id)).cancelling
    assert await queue.beat("w") == {running.job_id: JobSignal.CANCEL}
    commit = Commit(running.job_id, taken.epoch, deltas(running.job_id, 1))
    assert await queue.commit("w", [commit]) == {running.job_id: JobSignal.CANCEL}
    error = Cancelled("stopped").body()
    end = Failed(position=1, state="cancelled", error=error)
    assert await queue.finish("w", Ending(running, taken.epoch, commit.deltas, 1, end))
    for job in (queued, claimed, running):
        assert (await queue.cancel("default", job.job_id)).state == "cancelled"
        result = await queue.result("default", job.job_id)
        assert result is not None and result.state == "cancelled"
    assert await queue.beat("w") == {}
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running) == (0, 0)


@on_a_lane
async def test_a_cancelled_job_of_a_dead_worker_ends_when_it_is_reaped(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    made = deltas(taken.job.job_id, 3)
    await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, made, 7, 2)])
    await queue.cancel("default", taken.job.job_id)
    await lapse(queue, "w")
    assert await queue.reap() == 1
    assert (await queue.status("default", taken.job.job_id)).state == "cancelled"
    result = await queue.result("default", taken.job.job_id)
    assert result is not None and result.choices[0].text == made[0].text
    assert result.usage == Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)


@on_a_lane
async def test_a_deadline_acts_in_the_queue_at_the_start_and_while_running(
    queue: WorkerQueue,
) -> None:
    swept, late, running = (a_job(timeout_ms=60_000) for _ in range(3))
    await queue.enqueue(running, None, "d")
    taken = await started(queue)
    assert taken.left_ms is not None and 50_000 < taken.left_ms <= 60_000
    await queue.enqueue(late, None, "d")
    entries = await queue.read("w", 1) or []
    await queue.enqueue(swept, None, "d")
    for job in (swept, late, running):
        await redis_of(queue).hset(LANE.job(job.job_id), "deadline", 1)
    assert await queue.start("w", entries[0]) is None
    await redis_of(queue).zadd(f"{LANE.prefix}deadlines", {swept.job_id: 1, running.job_id: 1})
    await queue.sweep()
    for job in (swept, late):
        assert (await queue.status("default", job.job_id)).state == "expired"
    assert await queue.beat("w") == {running.job_id: JobSignal.DEADLINE}
    commit = Commit(running.job_id, taken.epoch, deltas(running.job_id, 1))
    assert await queue.commit("w", [commit]) == {running.job_id: JobSignal.DEADLINE}


@on_a_lane
async def test_what_the_scripts_end_by_themselves_reads_as_an_error_of_ours(
    queue: WorkerQueue,
) -> None:
    cancelled, expired = a_job(), a_job(timeout_ms=60_000)
    for job in (cancelled, expired):
        await queue.enqueue(job, None, "d")
    await queue.cancel("default", cancelled.job_id)
    await redis_of(queue).hset(LANE.job(expired.job_id), "deadline", 1)
    assert await queue.start("w", (await queue.read("w", 1) or [])[0]) is None
    for job, kind in ((cancelled, Cancelled), (expired, DeadlineExceeded)):
        (end,) = (await queue.attach("default", job.job_id, "r", 0)).events
        assert isinstance(end, Failed)
        assert end.error == kind(end.error.message).body()


@on_a_lane
async def test_a_lane_of_jobs_left_by_dead_workers_is_handed_on_64_at_a_time(
    queue: WorkerQueue,
) -> None:
    jobs = [a_job() for _ in range(100)]
    for job in jobs:
        await queue.enqueue(job, None, "d")
    for entry in (await queue.read("w", 100) or [])[:50]:
        taken = await queue.start("w", entry)
        assert taken
        await queue.commit("w", [Commit(entry.job_id, taken.epoch, [delta(entry.job_id, 0)])])
    await lapse(queue, "w")
    assert [await queue.reap() for _ in range(3)] == [64, 36, 0]
    assert await queue.beat("w") is None
    assert await queue.workers() == []
    await queue.register("v", WorkerCard())
    entries = await queue.read("v", 200) or []
    assert {entry.job_id for entry in entries} == {job.job_id for job in jobs}
    await queue.unregister("v")
    assert (await queue.counts()).num_queued == 100
    for name in ("resume", "high", "normal", "batch"):
        groups = await redis_of(queue).xinfo_consumers(LANE.ready(name), "workers")
        assert groups == []


@on_a_lane
async def test_a_job_read_by_a_worker_that_was_reaped_meanwhile_is_not_stuck(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(), None, "d")
    await queue.register("ghost", WorkerCard())
    assert len(await queue.read("ghost", 1) or []) == 1
    await redis_of(queue).zrem(f"{LANE.prefix}workers", "ghost")
    assert await queue.reap() == 1
    assert (await started(queue)).epoch == 1


@on_a_lane
async def test_payloads_that_nobody_could_run_end_as_failed_and_name_the_field(
    queue: WorkerQueue,
) -> None:
    cases = {
        b"{": "Invalid JSON",
        b'{"job_id":"\xff"}': "Invalid JSON",
        b'{"model":3}': "job_id",
        b"[]": "job",
        a_job(model="other").dump().encode(): "lies in the place of",
        b'{"job_id":"x","model":"tiny","n":1}': "n: Extra",
    }
    for payload, sentence in cases.items():
        job = a_job()
        await queue.enqueue(job, None, "d")
        await redis_of(queue).set(f"{LANE.job(job.job_id)}:request", payload)
        assert await queue.start("w", (await queue.read("w", 1) or [])[0]) is None
        result = await queue.result("default", job.job_id)
        assert result is not None and result.error is not None
        assert (result.state, result.error.status) == ("failed", 400)
        assert sentence in result.error.message
    assert (await queue.counts()).num_running == 0


@on_a_lane
async def test_entries_that_are_not_ours_are_dropped(queue: WorkerQueue) -> None:
    await redis_of(queue).xadd(LANE.ready("normal"), {"garbage": "1"})
    await redis_of(queue).xadd(LANE.ready("normal"), {"job": "job_nowhere"})
    entries = await queue.read("w", 5) or []
    assert [entry.job_id for entry in entries] == ["job_nowhere"]
    assert await queue.start("w", entries[0]) is None
    assert await queue.start("w", Entry("high", "1-1", "job_nowhere")) is None
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running) == (0, 0)


@on_a_lane
async def test_out_of_memory_refuses_new_jobs_whole_and_lets_running_ones_end(
    queue: WorkerQueue,
) -> None:
    job, waiting = a_job(), a_job()
    for one in (job, waiting):
        await queue.enqueue(one, None, "d")
    taken = await started(queue)
    before = set(await redis_of(queue).keys("*"))
    await redis_of(queue).config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull):
            await queue.enqueue(a_job(), None, "d")
        assert set(await redis_of(queue).keys("*")) == before
        commit = Commit(job.job_id, taken.epoch, deltas(job.job_id, 1))
        assert await queue.commit("w", [commit]) == {job.job_id: JobSignal.KEEP}
        assert await queue.beat("w") == {}
        page = await queue.attach("default", job.job_id, "late", 0)
        assert page.events == commit.deltas
        await queue.detach(job.job_id, "late")
        assert await finish(queue, taken, deltas(job.job_id, 1, 1))
        await queue.unregister("w")
        await queue.register("v", WorkerCard())
        assert await finish(queue, await started(queue, "v"), deltas(waiting.job_id, 1), "v")
        await queue.sweep()
        await queue.unregister("v")
    finally:
        await redis_of(queue).config_set("maxmemory", 0)
    for one in (job, waiting):
        assert (await queue.status("default", one.job_id)).state == "succeeded"


@on_a_lane
async def test_a_foreground_job_without_listeners_is_cancelled_after_a_grace(
    queue: WorkerQueue,
) -> None:
    unheard, heard, running = a_job(), a_job(), a_job(priority_class="high")
    background = a_job(background=True)
    for job in (running, unheard, background):
        await queue.enqueue(job, None, "d")
    await queue.enqueue(heard, LANE.inbox("r"), "d")
    taken = await started(queue)

    async def look(passed_ms: int) -> list[str]:
        """Sweep, as if it were time to look and the time had passed since the last one."""
        names = [job.job_id for job in (unheard, heard, running, background)]
        for name in names:
            if await redis_of(queue).zscore(f"{LANE.prefix}orphans", name):
                await redis_of(queue).zadd(f"{LANE.prefix}orphans", {name: 1})
            if since := await redis_of(queue).hget(LANE.job(name), "orphaned"):
                await redis_of(queue).hset(LANE.job(name), "orphaned", int(since) - passed_ms)
        await queue.sweep()
        return [(await queue.status("default", name)).state for name in names]

    async with redis_of(queue).pubsub() as pubsub:
        await pubsub.subscribe(LANE.inbox("r"))
        await pubsub.get_message(timeout=120)
        assert await look(0) == ["ready", "ready", "admitting", "ready"]
        assert await look(9000) == ["ready", "ready", "admitting", "ready"]
        assert await look(2000) == ["cancelled", "ready", "admitting", "ready"]
        assert await queue.beat("w") == {running.job_id: JobSignal.CANCEL}
    assert taken.job == running
    assert await look(0) == ["cancelled", "ready", "admitting", "ready"]
    assert await look(11_000) == ["cancelled", "cancelled", "admitting", "ready"]


@on_a_lane
async def test_many_listened_to_are_looked_at_more_seldom_so_that_a_sweep_ends(
    queue: WorkerQueue,
) -> None:
    """With a look at each in every fifth of the grace the first were due again before the last."""
    queue.orphan_grace_ms = 5
    jobs = [a_job() for _ in range(3200)]
    await asyncio.gather(*(queue.enqueue(job, LANE.inbox("r"), "d") for job in jobs))
    orphans = f"{LANE.prefix}orphans"
    async with redis_of(queue).pubsub() as pubsub:
        await pubsub.subscribe(LANE.inbox("r"))
        await pubsub.get_message(timeout=120)
        await redis_of(queue).zadd(orphans, {job.job_id: 1 for job in jobs})
        assert 3200 <= await asyncio.wait_for(queue.sweep(), 60) < 2 * 3200
    assert await redis_of(queue).zcount(orphans, 2, "+inf") == 3200


@on_a_lane
async def test_who_comes_back_in_time_keeps_the_job(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    orphans = f"{LANE.prefix}orphans"
    await redis_of(queue).zadd(orphans, {job.job_id: 1})
    await queue.sweep()
    await redis_of(queue).hset(LANE.job(job.job_id), "orphaned", 1)
    await redis_of(queue).zadd(orphans, {job.job_id: 1})
    async with redis_of(queue).pubsub() as pubsub:
        await pubsub.subscribe("mine")
        await pubsub.get_message(timeout=120)
        await queue.attach("default", job.job_id, "mine", 0)
        await queue.sweep()
        assert (await queue.status("default", job.job_id)).state == "ready"
        assert await redis_of(queue).hget(LANE.job(job.job_id), "orphaned") is None
        await queue.detach(job.job_id, "mine")
        channels = await redis_of(queue).hget(LANE.job(job.job_id), "channels")
        assert channels == LANE.channel(job.job_id).encode()


@on_a_lane
async def test_a_reader_joins_at_every_cursor_through_every_change_of_worker(
    queue: WorkerQueue,
) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    made: list[Delta] = []
    for counts in ((3, 1), (), (2,), (1, 4, 1)):  # one worker starts, and commits nothing
        taken = await started(queue)
        assert taken.log == made
        for count in counts:
            new = delta(job.job_id, made[-1].end if made else 0, count)
            made.append(new)
            await queue.commit("w", [Commit(job.job_id, taken.epoch, [new])])
        await queue.release("w", [job.job_id])
    taken = await started(queue)
    await finish(queue, taken, made)
    tokens = [token for one in made for token in one.token_ids]
    whole = "".join(one.text for one in made)
    for is_logged in (True, False):
        if not is_logged:
            await redis_of(queue).delete(f"{LANE.job(job.job_id)}:log")
        for cursor in range(len(tokens) + 3):
            page = await queue.attach("default", job.job_id, "r", cursor)
            assert page.state == "succeeded" and not page.more
            rest = [left for event in page.events if (left := after(event, cursor))]
            assert isinstance(rest.pop(), Done)
            got = [event for event in rest if isinstance(event, Delta)]
            had = "".join(one.text for one in made if one.end <= cursor)
            assert [token for one in got for token in one.token_ids] == tokens[cursor:]
            assert had + "".join(one.text for one in got) == whole
            assert not is_logged or len(page.events) <= len(rest) + 2  # no more than was asked for


@on_a_lane
async def test_a_long_log_comes_in_pages(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    made = deltas(taken.job.job_id, *[1] * 1100)
    await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, made)])
    cursor, sizes = 0, []
    while True:
        page = await queue.attach("default", taken.job.job_id, "r", cursor)
        new = [left for event in page.events if (left := after(event, cursor))]
        assert new == made[cursor : cursor + len(new)]
        cursor += len(new)
        sizes.append(len(page.events))
        if not page.more:
            break
    assert cursor == 1100 and max(sizes) == 512


@on_a_lane
async def test_a_page_of_large_events_ends_sooner_and_goes_on_past_each(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    sizes = [PAGE_BYTES, PAGE_BYTES, *[PAGE_BYTES // 100] * 300, PAGE_BYTES]
    made = [Delta(position=at, token_ids=[7], text="x" * size) for at, size in enumerate(sizes)]
    for each in made:
        await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, [each])])
    got, most = list[Event](), 0
    while len(got) < len(made):
        page = await queue.attach("default", taken.job.job_id, "r", max(0, len(got) - 1))
        new = page.events[1 if got else 0 :]
        assert new and page.more
        got += new
        most = max(most, len(page.events))
    assert got == made and 90 <= most <= 101


@on_a_lane
async def test_another_tenant_finds_nothing(queue: WorkerQueue) -> None:
    job = a_job(tenant="mine")
    await queue.enqueue(job, None, "d")
    for ask in (queue.status, queue.result, queue.cancel, queue.delete):
        with pytest.raises(JobNotFound):
            await ask("other", job.job_id)
    with pytest.raises(JobNotFound):
        await queue.attach("other", job.job_id, "spy", 0)
    assert (
        await redis_of(queue).hget(LANE.job(job.job_id), "channels")
        == LANE.channel(job.job_id).encode()
    )
    assert (await queue.status("mine", job.job_id)).state == "ready"


@on_a_lane
async def test_a_result_kept_no_longer_is_gone_and_not_unknown(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    await finish(queue, taken, deltas(taken.job.job_id, 1))
    key = LANE.job(taken.job.job_id)
    await redis_of(queue).delete(f"{key}:log", f"{key}:result")
    with pytest.raises(JobGone):
        await queue.result("default", taken.job.job_id)
    with pytest.raises(JobGone):
        await queue.attach("default", taken.job.job_id, "r", 0)
    await redis_of(queue).delete(key)
    with pytest.raises(JobNotFound):
        await queue.result("default", taken.job.job_id)


@on_a_lane
async def test_a_kept_request_is_its_tenants_alone(queue: WorkerQueue) -> None:
    kept, dropped = (a_job() for _ in range(2))
    await queue.enqueue(kept, None, "d", result_ttl_s=100, keeps_request=True)
    await queue.enqueue(dropped, None, "d")
    for job in (kept, dropped):
        assert Job.model_validate_json(await queue.request("default", job.job_id)) == job
    for job in (kept, dropped):
        await finish(queue, await started(queue), deltas(job.job_id, 1))
    assert Job.model_validate_json(await queue.request("default", kept.job_id)) == kept
    with pytest.raises(JobGone):
        await queue.request("default", dropped.job_id)
    with pytest.raises(JobNotFound):
        await queue.request("other", kept.job_id)
    key = LANE.job(kept.job_id)
    left_s = [await redis_of(queue).ttl(f"{key}:{part}") for part in ("request", "result")]
    assert all(90 < each <= 100 for each in left_s)
    await queue.delete("default", kept.job_id)
    assert await keys_of(queue, kept.job_id) == set()


@on_a_lane
async def test_a_deleted_job_leaves_nothing_behind(queue: WorkerQueue) -> None:
    running, ended, queued = (a_job(timeout_ms=60_000, metadata={"a": "b"}) for _ in range(3))
    for job in (running, ended, queued):
        await queue.enqueue(job, None, "d")
    taken = await started(queue)
    await finish(queue, await started(queue), deltas(ended.job_id, 2))
    for job in (running, ended, queued):
        await queue.delete("default", job.job_id)
    for job in (ended, queued):
        assert await keys_of(queue, job.job_id) == set()
    assert await redis_of(queue).get(f"{LANE.job(running.job_id)}:request") is None
    assert not await redis_of(queue).hexists(LANE.job(running.job_id), "metadata")
    assert await queue.beat("w") == {running.job_id: JobSignal.CANCEL}
    assert await finish(queue, taken, deltas(running.job_id, 2))
    assert await keys_of(queue, running.job_id) == set()
    with pytest.raises(JobNotFound):
        await queue.status("default", running.job_id)


@on_a_lane
async def test_a_deleted_job_of_a_dead_worker_leaves_nothing_behind(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, deltas(taken.job.job_id, 3))])
    await queue.delete("default", taken.job.job_id)
    await lapse(queue, "w")
    await queue.reap()
    assert await keys_of(queue, taken.job.job_id) == set()


@on_a_lane
async def test_the_scripts_come_back_after_the_cache_was_flushed(queue: WorkerQueue) -> None:
    for _ in range(2):
        await queue.enqueue(a_job(), None, "d")
        await redis_of(queue).script_flush()
        taken = await started(queue)
        await redis_of(queue).script_flush()
        assert await finish(queue, taken, deltas(taken.job.job_id, 1))


@on_a_lane
async def test_a_worker_tells_of_itself_until_it_leaves(queue: WorkerQueue) -> None:
    await queue.register("w", WorkerCard(host="here", max_num_seqs=8))
    await queue.beat("w", {"num_running": 3})
    (status,) = await queue.workers()
    assert (status.worker, status.card.host, status.stats) == ("w", "here", {"num_running": 3})
    assert 0 < status.lease_left_ms <= 5000
    await queue.beat("w")
    assert (await queue.workers())[0].stats == {"num_running": 3}
    await queue.unregister("w")
    assert await queue.workers() == []
    assert await redis_of(queue).keys("*worker:w*") == []


def test_every_key_of_a_lane_shares_its_slot(redis_url: str) -> None:
    async def main() -> None:
        link = connect(redis_url)
        lane = Lane("a {strange} model: 1", 3)
        queue = WorkerQueue(link, lane)
        await queue.register("w", WorkerCard())
        job = a_job(model=lane.model, job_id=lane.new_job_id(), timeout_ms=1000)
        await queue.enqueue(job, None, "d")
        await finish(queue, await started(queue), deltas(job.job_id, 1))
        keys = [key.decode() for key in await plain(link).keys("*")]
        assert len(keys) > 6
        assert {key[: len(lane.prefix)] for key in keys} == {lane.prefix}
        await link.aclose()

    asyncio.run(main())


class LossyRedis(Redis):
    """Loses the reply to every command, once, after the server carried it out."""

    async def call(self, *words: Word) -> Reply:
        await super().call(*words)
        return await super().call(*words)


def test_every_call_may_be_repeated_because_its_reply_was_lost(redis_url: str) -> None:
    async def main() -> None:
        queue = WorkerQueue(LossyRedis(parse(redis_url)), LANE)
        await queue.register("w", WorkerCard())
        jobs = [a_job() for _ in range(4)]
        for job in jobs:
            assert (await queue.enqueue(job, None, "d")).outcome is Outcome.DUPLICATE
        entries = [entry for _ in range(4) for entry in await queue.read("w", 1) or []]
        assert [entry.job_id for entry in entries] == [job.job_id for job in jobs]
        taken = [await queue.start("w", entry) for entry in entries]
        assert [one and one.epoch for one in taken] == [1, 1, 1, 1]
        made = deltas(jobs[0].job_id, 2)
        commit = Commit(jobs[0].job_id, 1, made)
        assert await queue.commit("w", [commit]) == {jobs[0].job_id: JobSignal.DUPLICATE}
        assert await queue.finish("w", Ending(jobs[0], 1, made, 1, done(made)))
        await queue.cancel("default", jobs[1].job_id)
        await queue.delete("default", jobs[2].job_id)
        await queue.release("w", [jobs[1].job_id, jobs[2].job_id, jobs[3].job_id])
        await queue.reap()
        counts = await queue.counts()
        assert (counts.num_queued, counts.num_running, counts.num_ended) == (1, 0, 3)
        assert len(await log_of(queue, jobs[0].job_id)) == 2
        await queue.connection.redis.aclose()

    asyncio.run(main())


@on_a_lane
async def test_an_entry_that_its_job_left_starts_nothing(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    (old,) = await queue.read("w", 1) or []
    assert await queue.release("w", [old.job_id]) == 1
    assert await queue.start("w", old) is None
    now = (await redis_of(queue).hget(LANE.job(old.job_id), "entry") or b"").decode()
    namesake = Entry("normal", now, old.job_id)  # ids of two streams may be equal
    assert await queue.start("w", namesake) is None
    taken = await started(queue)
    assert (taken.epoch, taken.job.job_id) == (1, old.job_id)
    assert await queue.start("w", old) is None


@on_a_lane
async def test_a_worker_without_a_lease_starts_nothing(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    [entry] = await queue.read("w", 1) or []
    await redis_of(queue).zrem(f"{LANE.prefix}workers", "w")
    assert await queue.start("w", entry) is None
    assert (await queue.status("default", entry.job_id)).state == "ready"
    await queue.register("v", WorkerCard())
    assert await queue.reap() == 1
    assert (await started(queue, "v")).epoch == 1


@on_a_lane
async def test_an_end_that_does_not_fit_the_log_gives_the_job_to_another(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(), None, "d")
    taken = await started(queue)
    made = deltas(taken.job.job_id, 2, 1)
    short = Ending(taken.job, taken.epoch, made, 0, done(made[:1]))
    assert not await queue.finish("w", short)
    again = await started(queue)
    assert (again.epoch, again.log) == (2, made)
    assert await finish(queue, again, made)


@on_a_lane
async def test_a_channel_is_attached_once_however_often_its_reader_asks(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), "mine", "d")
    taken = await started(queue)
    async with redis_of(queue).pubsub() as pubsub:
        await pubsub.subscribe("mine")
        await pubsub.get_message(timeout=120)
        for _ in range(3):
            await queue.attach("default", taken.job.job_id, "mine", 0)
        made = deltas(taken.job.job_id, 1)
        await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, made)])
        message = await pubsub.get_message(timeout=120)
    assert message and message["data"].count(b"\n") == 0
    assert await redis_of(queue).hget(LANE.job(taken.job.job_id), "channels") == b"mine"
