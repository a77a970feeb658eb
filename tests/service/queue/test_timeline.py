"""What befell a job, which jobs and accounts are listed, and how long an answer took."""

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Commit, Ending
from penstock.schemas.event import Done, Timing, Usage
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from scripted import a_job, continued, deltas, finish, on_a_lane, started


@on_a_lane
async def test_a_timeline_tells_of_each_worker_and_of_how_it_lost_the_job(
    queue: WorkerQueue,
) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    made, takings = deltas(job.job_id, 1), ["w", "v", "u", "t"]
    for name in takings:
        await queue.register(name, WorkerCard())
        taken = await started(queue, name)
        if name != "t":
            made.append(continued(job.job_id, made))
            await queue.commit(name, [Commit(job.job_id, taken.epoch, made[len(taken.log) :])])
        if name == "w":
            await queue.release(name, [job.job_id])
        elif name != "t":
            await queue.unregister(name, crashed=name == "v")
    await finish(queue, taken, made, "t")
    shown = (await queue.status("default", job.job_id)).timeline
    assert [(each.what, each.worker or each.why) for each in shown] == [
        ("queued", None),
        ("started", "w"),
        ("first_token", None),
        ("requeued", "handed_back"),
        ("started", "v"),
        ("first_token", None),
        ("requeued", "crashed"),
        ("started", "u"),
        ("first_token", None),
        ("requeued", "left"),
        ("started", "t"),
        ("succeeded", None),
    ]
    times = [each.at_ms for each in shown]
    status = await queue.status("default", job.job_id)
    assert times == sorted(times)
    assert (times[0], times[1], times[-1]) == (
        status.created_ms,
        status.started_ms,
        status.ended_ms,
    )
    assert taken.epoch == 4 and taken.queued_ms == times[1] - times[0]
    assert taken.first_token_ms == times[2] - times[0]


@on_a_lane
async def test_a_timeline_is_bounded_and_ends_with_the_end(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    for _ in range(150):
        taken = await started(queue)
        await queue.release("w", [job.job_id])
    taken = await started(queue)
    assert taken.first_token_ms is None
    await finish(queue, taken, deltas(job.job_id, 1))
    shown = (await queue.status("default", job.job_id)).timeline
    assert 50 < len(shown) < 200 and shown[-1].what == "succeeded"


@on_a_lane
async def test_the_jobs_that_changed_last_are_listed_for_their_tenant_alone(
    queue: WorkerQueue,
) -> None:
    jobs = [a_job(background=True) for _ in range(105)]
    for job in jobs:
        await queue.enqueue(job, None, "d")
    foreign = a_job(background=True, tenant="other")
    await queue.enqueue(foreign, None, "d")
    first = await started(queue)
    listed = [job_id for _, job_id in await queue.recent("default", 200)]
    assert len(listed) == 100 and first.job.job_id == jobs[0].job_id
    assert listed[0] == jobs[0].job_id and jobs[1].job_id not in listed
    assert [job_id for _, job_id in await queue.recent("other", 5)] == [foreign.job_id]
    await queue.delete("other", foreign.job_id)
    assert await queue.recent("other", 5) == []
    await queue.delete("default", jobs[0].job_id)  # it runs, and is erased at its end
    await finish(queue, first, deltas(jobs[0].job_id, 1))
    assert jobs[0].job_id not in [job_id for _, job_id in await queue.recent("default", 200)]


@on_a_lane
async def test_accounts_tell_what_they_have_and_used(queue: WorkerQueue) -> None:
    limits = Quota(tokens_per_day=1000, max_running=1, weight=2.5)
    account = Account(name="acme/key", limits=limits)
    for _ in range(3):
        await queue.enqueue(a_job(tenant="acme", background=True), None, "d", account=account)
    taken = await started(queue)
    await queue.enqueue(a_job(background=True), None, "d")
    await finish(queue, taken, deltas(taken.job.job_id, 4))
    taken = await started(queue)
    plain, acme = await queue.accounts(10)
    assert (plain.name, plain.tenant, plain.num_queued) == ("default", "default", 1)
    assert (acme.name, acme.tenant, acme.num_queued, acme.num_running) == ("acme/key", "acme", 1, 1)
    assert acme.tokens_today == acme.tokens_this_month == 5  # a prompt of one, and four
    assert acme.limits == limits and await queue.accounts(1) == [plain]


@on_a_lane
async def test_how_long_it_took_outlives_the_log(queue: WorkerQueue) -> None:
    job = a_job(background=True)
    await queue.enqueue(job, None, "d")
    taken, made = await started(queue), deltas(job.job_id, 2)
    timing = Timing(queue_ms=1, prefill_ms=2.5, decode_ms=3, num_attempts=2)
    end = Done(2, Usage(completion_tokens=2), checksum=made[-1].checksum, timing=timing)
    await queue.finish("w", Ending(job, taken.epoch, made, 0, end))
    result = await queue.result("default", job.job_id)
    assert result is not None and result.timing == timing
