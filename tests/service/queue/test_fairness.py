"""Whose turn it is: counted in ends and tokens, never in seconds."""

from collections import Counter

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Outcome
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, delta, finish, on_a_lane, started
from stepped import SteppedWorker


async def submit(
    queue: WorkerQueue, tenant: str, count: int, num_tokens: int, weight: float = 1.0
) -> None:
    account = Account(name=tenant, limits=Quota(weight=weight))
    for _ in range(count):
        job = a_job(tenant=tenant, params={"max_tokens": num_tokens}, background=True)
        assert (await queue.enqueue(job, None, "d", account=account)).outcome is Outcome.ACCEPTED


async def run_until_ended(worker: SteppedWorker, tenant: str, count: int) -> Counter[str]:
    """Ends by tenant until one had so many."""
    before = len(worker.ended)
    while True:
        ends = Counter(job.tenant for job in worker.ended[before:])
        if ends[tenant] >= count:
            return ends
        await worker.step()


def computed_by(worker: SteppedWorker) -> Counter[str]:
    """Tokens by tenant: those made, and the prompts, of one token each."""
    return worker.num_tokens + Counter(job.tenant for job in worker.ended)


@on_a_lane
async def test_a_flood_of_jobs_delays_another_tenants_ten_less_than_twice(
    queue: WorkerQueue,
) -> None:
    for slots, num_tokens in ((1, 4), (4, 5)):
        worker = SteppedWorker(queue, slots)
        await submit(queue, "flood", 1000, num_tokens)
        for _ in range(10):
            await worker.step()
        await submit(queue, "small", 10, num_tokens)
        ends = await run_until_ended(worker, "small", 10)
        assert ends.total() <= 20 + slots  # those that ran as it came, and one for each of its own
        await plain(queue.connection.redis).flushall()
        await worker.register()


@on_a_lane
async def test_shares_follow_the_weights(queue: WorkerQueue) -> None:
    """1 : 2 : 0.5, within 5 %, though the tenants' jobs are of different lengths."""
    weights = {"one": 1.0, "two": 2.0, "half": 0.5}
    for (tenant, weight), num_tokens in zip(weights.items(), (3, 8, 5), strict=True):
        await submit(queue, tenant, 400, num_tokens, weight=weight)
    worker = SteppedWorker(queue, 8)
    while worker.num_tokens.total() < 3500:
        await worker.step()
    computed = computed_by(worker)
    for tenant, weight in weights.items():
        share, fair = computed[tenant] / computed.total(), weight / 3.5
        assert abs(share - fair) < 0.05 * fair, (tenant, share, fair)


@on_a_lane
async def test_time_away_is_no_credit(queue: WorkerQueue) -> None:
    worker = SteppedWorker(queue, 2)
    await submit(queue, "busy", 200, 5)
    await submit(queue, "idler", 1, 5)
    await run_until_ended(worker, "busy", 100)
    await submit(queue, "idler", 60, 5)
    ends = await run_until_ended(worker, "idler", 20)
    assert 17 <= ends["busy"] <= 23


@on_a_lane
async def test_coming_and_going_is_no_credit_either(queue: WorkerQueue) -> None:
    """Who has one job at a time in the queue gets no more than its share."""
    worker = SteppedWorker(queue, 1)
    await submit(queue, "busy", 100, 2)
    before = 0
    await submit(queue, "dropper", 1, 8)
    for _ in range(200):
        await worker.step()
        dropped = sum(job.tenant == "dropper" for job in worker.ended)
        if dropped > before:
            before = dropped
            await submit(queue, "dropper", 1, 8)
    computed = computed_by(worker)
    assert 0.8 < computed["dropper"] / computed["busy"] < 1.2


@on_a_lane
async def test_the_accounts_of_a_tenant_share_its_turns(queue: WorkerQueue) -> None:
    for name in [*(f"a/{number}" for number in range(10)), *["b"] * 10]:
        for _ in range(4):
            job = a_job(tenant=name[0], background=True, params={"max_tokens": 4})
            await queue.enqueue(job, None, "d", account=Account(name=name))
    worker = SteppedWorker(queue, 2)
    while len(worker.ended) < 20:
        await worker.step()
    ends = Counter(job.tenant for job in worker.ended)
    assert 8 <= ends["a"] <= 12


@on_a_lane
async def test_classes_go_strictly_and_what_waited_too_long_one_class_up(
    queue: WorkerQueue,
) -> None:
    old, other = a_job(priority_class="batch"), a_job(priority_class="batch")
    for job in (other, old):
        await queue.enqueue(job, None, "d")
    newer = [a_job(priority_class="normal", tenant="x") for _ in range(3)]
    for job in newer:
        await queue.enqueue(job, None, "d")
    first = await started(queue)
    assert first.job == newer[0] and first.priority_class == "normal"
    await plain(queue.connection.redis).zadd(f"{LANE.prefix}waiting:batch", {old.job_id: 1})
    taken = [await started(queue) for _ in range(4)]
    assert taken[0].job == old and taken[0].priority_class == "normal"
    assert (await queue.status("default", old.job_id)).priority_class == "normal"
    assert [one.job for one in taken[1:]] == [*newer[1:], other]
    assert [one.turn for one in taken] == sorted(one.turn for one in taken)


@on_a_lane
async def test_of_a_large_batch_that_waited_too_long_one_job_at_a_time_goes_up(
    queue: WorkerQueue,
) -> None:
    """All of them would go before everything that comes later."""
    redis = plain(queue.connection.redis)
    batch = [a_job(priority_class="batch") for _ in range(20)]
    for job in batch:
        await queue.enqueue(job, None, "d")
    await redis.zadd(f"{LANE.prefix}waiting:batch", {job.job_id: 1 for job in batch})
    for _ in range(12):
        await queue.enqueue(a_job(), None, "d")
    order = []
    for _ in range(12):
        order.append((await started(queue)).job.priority_class)
        await queue.enqueue(a_job(), None, "d")
    assert order == ["normal"] * 12
    order = [(await started(queue)).job.priority_class for _ in range(14)]
    assert order == ["batch", *["normal"] * 12, "batch"]


@on_a_lane
async def test_a_worker_says_how_many_jobs_of_a_batch_it_takes(queue: WorkerQueue) -> None:
    for name in ("batch", "batch", "normal", "batch"):
        await queue.enqueue(a_job(priority_class=name), None, "d")
    read = [await queue.read("w", 8, batch=most) for most in (0, 1, None)]
    assert [[one.ready for one in entries or []] for entries in read] == [
        ["normal"],
        ["batch"],
        ["batch", "batch"],
    ]


@on_a_lane
async def test_of_one_account_the_earlier_deadline_goes_first(queue: WorkerQueue) -> None:
    """And a job without one is not put off for ever."""
    times = (None, 90_000, 60_000, 3_000_000, 60_000)
    jobs = [a_job(timeout_ms=ms) for ms in times]
    for job in jobs:
        await queue.enqueue(job, None, "d")
    order = [(await started(queue)).job for _ in jobs]
    assert order == [jobs[2], jobs[4], jobs[1], jobs[0], jobs[3]]


@on_a_lane
async def test_a_handed_back_job_keeps_its_turn(queue: WorkerQueue) -> None:
    await submit(queue, "a", 2, 2)
    first = await started(queue)
    await queue.release("w", [first.job.job_id])
    again = await started(queue)
    assert (again.job, again.turn) == (first.job, first.turn)


@on_a_lane
async def test_place_reason_and_time_are_told(queue: WorkerQueue) -> None:
    mine = [a_job(tenant="mine") for _ in range(3)]
    for job in mine:
        await queue.enqueue(job, None, "d")
    for number in range(12):  # a rate is known once jobs ended
        await queue.enqueue(a_job(tenant="mine"), None, "d")
        taken = await started(queue)
        if taken.job in mine:
            mine.remove(taken.job)
        await finish(queue, taken, [delta(taken.job.job_id, 0)])
        assert number < 12
    waiting = [a_job(tenant="late") for _ in range(3)]
    for job in waiting:
        await queue.enqueue(job, None, "d")
    places = [await queue.status("late", job.job_id) for job in waiting]
    assert [one.position for one in places] == sorted(one.position or 0 for one in places)
    assert all(one.reason in ("turn", "capacity") for one in places)
    etas = [one.eta_ms for one in places]
    assert None not in etas and etas == sorted(one or 0 for one in etas)
    while (taken := await started(queue)).job != waiting[0]:
        pass
    status = await queue.status("late", waiting[0].job_id)
    assert (status.position, status.reason) == (None, None)
    second = await queue.status("late", waiting[1].job_id)
    assert (second.position or 0) <= (places[1].position or 0)
