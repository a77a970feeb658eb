"""What an account may use, when a job may begin, and what is refused at submission."""

import random
from datetime import UTC, datetime, timedelta

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Commit, Outcome, Submission
from penstock.schemas.errors import BudgetExceeded, DeadlineUnmeetable, QueueTimeout, RateLimited
from penstock.schemas.event import Failed
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.refusal import refusal
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, delta, deltas, finish, on_a_lane, started
from stepped import SteppedWorker

DAY_MS = 86_400_000


def limited(**limits: float) -> Account:
    return Account(name="key", limits=Quota.model_validate(limits))


async def submit(queue: WorkerQueue, account: Account, **fields: object) -> Submission:
    job = a_job(**{"background": True, **fields})
    return await queue.enqueue(job, None, "d", account=account)


async def account_field(queue: WorkerQueue, field: str) -> int:
    return int(await plain(queue.connection.redis).hget(f"{LANE.prefix}account:key", field) or 0)


async def used(queue: WorkerQueue) -> dict[str, int]:
    """Of today, by field. A test that runs into midnight has two days."""
    total: dict[str, int] = {}
    redis = plain(queue.connection.redis)
    for key in await redis.keys(f"{LANE.prefix}usage:????-??-??:key"):
        assert await redis.ttl(key) > 0
        for field, count in (await redis.hgetall(key)).items():
            total[field.decode()] = total.get(field.decode(), 0) + int(count)
    return total


def next_midnight() -> datetime:
    now = datetime.now(UTC)
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)


async def minute_passes(queue: WorkerQueue) -> None:
    redis = plain(queue.connection.redis)
    began = await account_field(queue, "minute")
    await redis.hset(f"{LANE.prefix}account:key", "minute", began - 60_000)
    if await redis.zscore(f"{LANE.prefix}parked", "key"):
        await redis.zadd(f"{LANE.prefix}parked", {"key": 1})


@on_a_lane
async def test_requests_above_the_rate_are_refused_until_the_minute_is_over(
    queue: WorkerQueue,
) -> None:
    account = limited(requests_per_minute=3)
    for _ in range(3):
        assert (await submit(queue, account)).outcome is Outcome.ACCEPTED
    answer = await submit(queue, account)
    assert (answer.outcome, answer.reason) == (Outcome.LIMITED, "requests_per_minute")
    assert 0 < answer.retry_after_ms <= 60_000
    error = refusal(answer, a_job(), account.limits)
    assert "requests_per_minute: the 3 requests of this minute" in str(error)
    assert isinstance(error, RateLimited) and error.retry_after_ms == answer.retry_after_ms
    assert (await submit(queue, Account(name="other"))).outcome is Outcome.ACCEPTED
    await minute_passes(queue)
    assert (await submit(queue, account)).outcome is Outcome.ACCEPTED


@on_a_lane
async def test_who_would_rather_wait_starts_when_the_minute_is_over(queue: WorkerQueue) -> None:
    account = limited(requests_per_minute=2)
    jobs = [a_job(background=True, over_limit="wait") for _ in range(5)]
    for job in jobs:
        assert (await queue.enqueue(job, None, "d", account=account)).outcome is Outcome.ACCEPTED
    assert len(await queue.read("w", 5) or []) == 2
    status = await queue.status("default", jobs[4].job_id)
    assert (status.reason, status.position) == ("rate", 3)
    assert (await queue.counts()).by_reason == {"rate": 3}
    assert await queue.read("w", 5) == []
    await minute_passes(queue)
    assert len(await queue.read("w", 5) or []) == 2
    await minute_passes(queue)
    assert len(await queue.read("w", 5) or []) == 1


@on_a_lane
async def test_tokens_run_over_in_one_minute_count_in_the_next(queue: WorkerQueue) -> None:
    account = limited(tokens_per_minute=200)
    assert (await submit(queue, account)).outcome is Outcome.ACCEPTED
    taken = await started(queue)
    made = deltas(taken.job.job_id, *[40] * 10)
    await queue.commit("w", [Commit(taken.job.job_id, taken.epoch, made, 50, 0)])
    for minutes_left in (2, 1, 0):
        answer = await submit(queue, account)
        assert (answer.outcome is Outcome.LIMITED) == (minutes_left > 0)
        assert -(-answer.retry_after_ms // 60_000) == minutes_left
        await minute_passes(queue)


@on_a_lane
async def test_more_may_not_wait_than_the_account_allows(queue: WorkerQueue) -> None:
    account = limited(max_queued=2)
    for outcome in (Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.LIMITED):
        assert (await submit(queue, account)).outcome is outcome
    answer = await submit(queue, account)
    assert answer.reason == "max_queued" and answer.retry_after_ms >= 100
    await started(queue)
    assert (await submit(queue, account)).outcome is Outcome.ACCEPTED


@on_a_lane
async def test_never_more_run_than_may_and_none_is_left_over(queue: WorkerQueue) -> None:
    """200 jobs, ten at once, with workers that hand back and die."""
    chance, account = random.Random(1), limited(max_running=10)
    jobs = [a_job(background=True, params={"max_tokens": 2}) for _ in range(200)]
    for job in jobs:
        await queue.enqueue(job, None, "d", account=account)
    workers = [SteppedWorker(queue, 30, f"w{number}") for number in range(2)]
    for worker in workers:
        await worker.register()
    ended: set[str] = set()
    for number in range(2, 400):
        await chance.choice(workers).step()
        at_once = sum(len(worker.running) for worker in workers)
        assert at_once <= await account_field(queue, "running") <= 10
        at = chance.randrange(2)
        if chance.random() < 0.1 and workers[at].running:
            gone = list(workers[at].running)[:3]
            await queue.release(workers[at].name, gone)
            for job_id in gone:
                del workers[at].running[job_id]
        elif chance.random() < 0.1:
            dead = workers[at].name
            ended |= {job.job_id for job in workers[at].ended}
            workers[at] = SteppedWorker(queue, 30, f"w{number}")
            await workers[at].register()
            await queue.unregister(dead)
        done_now = ended | {job.job_id for worker in workers for job in worker.ended}
        if len(done_now) == len(jobs):
            break
    assert done_now == {job.job_id for job in jobs}
    assert (await account_field(queue, "running"), await account_field(queue, "queued")) == (0, 0)
    assert await plain(queue.connection.redis).ttl(f"{LANE.prefix}account:key") > 0
    assert (await used(queue))["jobs"] == 200


@on_a_lane
async def test_held_by_its_account_a_job_says_so_and_holds_up_nobody_else(
    queue: WorkerQueue,
) -> None:
    account = limited(max_running=1)
    jobs = [a_job() for _ in range(3)]
    for job in jobs:
        await queue.enqueue(job, None, "d", account=account)
    first = await started(queue)
    other = a_job(tenant="other", priority_class="batch")
    await queue.enqueue(other, None, "d")
    assert (await started(queue)).job == other
    assert (await queue.status("default", jobs[2].job_id)).reason == "running"
    await finish(queue, first, deltas(first.job.job_id, 1))
    assert (await started(queue)).job == jobs[1]
    await queue.cancel("default", jobs[2].job_id)
    raised = Account(name="key", limits=Quota(max_running=2))
    last = a_job()
    await queue.enqueue(last, None, "d", account=raised)
    assert (await started(queue)).job == last


@on_a_lane
async def test_a_budget_ends_a_job_at_exactly_its_last_token(queue: WorkerQueue) -> None:
    """10 tokens of prompt and 990 of completion, in deltas that do not fit, through a crash."""
    account = limited(tokens_per_day=1000)
    job = a_job(background=True, params={"max_tokens": 5000})
    await queue.enqueue(job, None, "d", account=account)
    made: list[object] = []
    for worker in ("w", "v"):
        await queue.register(worker, WorkerCard())
        taken = await started(queue, worker)
        made, signal = list(taken.log), "K"
        while signal == "K" and not (worker == "w" and len(made) > 160):
            made.append(delta(job.job_id, made[-1].end if made else 0, 4))
            commit = Commit(job.job_id, taken.epoch, made[-1:], 10, 0)
            signal = (await queue.commit(worker, [commit]))[job.job_id]
        if worker == "w":
            await queue.unregister(worker)
    assert signal == "B" and len(made) * 4 == 992
    await queue.register("u", WorkerCard())
    await queue.unregister("v")  # told to stop, and gone
    stepped = SteppedWorker(queue, 1, "u")
    assert (await queue.status("default", job.job_id)).num_tokens == 988
    taken = await started(queue, "u")
    assert taken.budget_left == 2
    assert taken.budget_reset_at == next_midnight().timestamp()
    stepped.running[job.job_id] = (taken, list(taken.log))
    while stepped.running:
        await stepped.step()
    status = await queue.status("default", job.job_id)
    assert (status.state, status.num_tokens) == ("succeeded", 990)
    day = await used(queue)
    assert day["prompt_tokens"] + day["completion_tokens"] == 1000
    answer = await submit(queue, account)
    assert (answer.outcome, answer.reason) == (Outcome.LIMITED, "tokens_per_day")
    now = datetime.now(UTC)
    left_ms = DAY_MS - (now.hour * 3600 + now.minute * 60 + now.second) * 1000
    assert abs(answer.retry_after_ms - left_ms) < 60_000
    error = refusal(answer, job, account.limits)
    assert isinstance(error, BudgetExceeded)
    assert "tokens_per_day: the 1000 tokens of this day of UTC are used up" in error.message
    assert f"they renew at {next_midnight():%Y-%m-%d} 00:00 UTC" in error.message
    assert error.body().reset_at == next_midnight().timestamp()
    patient = a_job(background=True, over_limit="wait")
    await queue.enqueue(patient, None, "d", account=account)
    assert await queue.read("u", 1) == []
    assert (await queue.status("default", patient.job_id)).reason == "budget"


@on_a_lane
async def test_jobs_of_one_budget_stop_together_at_its_end(queue: WorkerQueue) -> None:
    account = limited(tokens_per_month=200)
    for _ in range(4):
        assert (await submit(queue, account, params={"max_tokens": 500})).outcome == "accepted"
    late = [a_job(background=True) for _ in range(2)]  # accepted while there is budget
    for job in late:
        await queue.enqueue(job, None, "d", account=account)
    worker = SteppedWorker(queue, 4)
    while len(worker.ended) < 4:
        await worker.step()
    day = await used(queue)
    assert day["completion_tokens"] == worker.num_tokens["default"] or day["prompt_tokens"] == 4
    assert day["prompt_tokens"] + day["completion_tokens"] == 200
    assert await queue.read("w", 4) == []
    for job in late:
        result = await queue.result("default", job.job_id)
        assert result and result.error and result.error.code == "budget_exceeded"
        first = (datetime.now(UTC).replace(day=1) + timedelta(days=32)).replace(day=1)
        renews = first.replace(hour=0, minute=0, second=0, microsecond=0)
        assert result.error.reset_at == renews.timestamp()
    assert await account_field(queue, "running") == 0


@on_a_lane
async def test_what_a_stopped_job_did_not_use_is_given_back(queue: WorkerQueue) -> None:
    account = limited(tokens_per_day=100)
    await submit(queue, account)
    taken = await started(queue)
    job_id = taken.job.job_id
    made = deltas(job_id, 30, 80)
    signals = await queue.commit("w", [Commit(job_id, taken.epoch, made, 10, 5)])
    assert signals == {job_id: "B"}
    assert (await used(queue))["completion_tokens"] == 90
    await queue.cancel("default", job_id)
    await queue.unregister("w")
    assert await used(queue) == {
        "prompt_tokens": 10, "cached_tokens": 5, "completion_tokens": 30, "jobs": 1
    }  # fmt: skip


@on_a_lane
async def test_a_delayed_job_waits_until_it_may_begin(queue: WorkerQueue) -> None:
    later, soon = a_job(delay_ms=600_000), a_job(delay_ms=300)
    for job in (later, soon):
        assert (await queue.enqueue(job, None, "d")).outcome is Outcome.ACCEPTED
    status = await queue.status("default", later.job_id)
    assert status.reason == "delayed"
    assert await queue.read("w", 2) == []
    entries = None
    while not entries:
        await queue.news(2000)
        entries = await queue.read("w", 2)
    assert [entry.job_id for entry in entries] == [soon.job_id]
    taken = await queue.start("w", entries[0])
    assert taken and taken.waited_ms >= 300
    counts = await queue.counts()
    assert (counts.num_delayed, counts.num_queued, counts.num_unended) == (1, 1, 2)
    await queue.cancel("default", later.job_id)
    assert (await queue.counts()).num_delayed == 0


@on_a_lane
async def test_what_was_not_started_in_time_ends_and_what_was_goes_on(queue: WorkerQueue) -> None:
    redis = plain(queue.connection.redis)
    begun, waiting = (a_job(queue_timeout_ms=60_000) for _ in range(2))
    for job in (begun, waiting):
        await queue.enqueue(job, None, "d")
    taken = await started(queue)
    await queue.release("w", [begun.job_id])
    await redis.hset(LANE.job(waiting.job_id), "start_by", 1)
    await redis.zadd(f"{LANE.prefix}deadlines", {waiting.job_id: 1})
    assert await redis.zscore(f"{LANE.prefix}deadlines", begun.job_id) is None
    assert await redis.hget(LANE.job(begun.job_id), "start_by") is None
    await queue.sweep()
    (end,) = (await queue.attach("default", waiting.job_id, "r", 0)).events
    assert isinstance(end, Failed)
    assert end.error == QueueTimeout(end.error.message).body()
    assert (await started(queue)).job == taken.job == begun


@on_a_lane
async def test_a_deadline_that_cannot_be_met_is_refused_once_the_rate_is_known(
    queue: WorkerQueue,
) -> None:
    for _ in range(20):
        await queue.enqueue(a_job(), None, "d")
    assert (await queue.enqueue(a_job(timeout_ms=1), None, "d")).outcome is Outcome.ACCEPTED
    # 20 ends in 10 s.
    redis = plain(queue.connection.redis)
    await redis.hset(f"{LANE.prefix}counts", mapping={"ends": 20, "took_ms": 10_000})
    answer = await queue.enqueue(a_job(timeout_ms=5000), None, "d")
    assert answer.outcome is Outcome.UNMEETABLE and 4000 <= answer.retry_after_ms <= 7000
    assert isinstance(refusal(answer, a_job()), DeadlineUnmeetable)
    assert (await queue.enqueue(a_job(timeout_ms=60_000), None, "d")).outcome is Outcome.ACCEPTED
    # Another tenant's turn comes sooner.
    other = a_job(timeout_ms=5000, tenant="other")
    assert (await queue.enqueue(other, None, "d")).outcome is Outcome.ACCEPTED
    full = await queue.enqueue(a_job(), None, "d", max_queued=5)
    assert (full.outcome, full.retry_after_ms) == (Outcome.FULL, 500)
