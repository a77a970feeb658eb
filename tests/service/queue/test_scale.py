"""Ten thousand of everything: a lane costs per job what a short one does, and keeps nothing."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from faults.big_batch import run_batch
from faults.invariants import check_leftovers
from metered import Cost, Meter
from penstock.compose.server import Server
from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Ending, Entry, Outcome
from penstock.schemas.job import Job
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.queue import MAX_JOBS_A_CALL
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, deltas, done, on_a_lane, queue_at

AT_ONCE = 128  # calls under way together
NUM_JOBS, NUM_TENANTS, NUM_TIMES = 10_000, 1_000, 10_000
FEW = 16  # of whatever a lane lists when nothing is in it
MOST_COMMANDS = 3_000  # in one call, whatever is queued: some milliseconds


@asynccontextmanager
async def lane_at(server: Server) -> AsyncIterator[tuple[WorkerQueue, Meter]]:
    """The worker `w` has read once, so the lane has all that it has for ever."""
    async with queue_at(server.url, lease_ms=600_000) as queue:
        await queue.register("w", WorkerCard())
        await queue.read("w", 1)
        with Meter(server.url) as meter:
            yield queue, meter


async def submit(queue: WorkerQueue, count: int, first: int = 0, **limits: int) -> list[Job]:
    """Of the tenants in turn, beginning with the tenant of number `first`."""
    submitted = list[Job]()
    for at in range(first, first + count, AT_ONCE):
        numbers = range(at, min(first + count, at + AT_ONCE))
        jobs = [a_job(tenant=f"t{each % NUM_TENANTS}", background=True) for each in numbers]
        answers = await asyncio.gather(*(_submit(queue, job, limits) for job in jobs))
        assert set(answers) == {Outcome.ACCEPTED}
        submitted += jobs
    return submitted


async def _submit(queue: WorkerQueue, job: Job, limits: dict[str, int]) -> Outcome:
    account = Account(name=job.tenant, limits=Quota.model_validate(limits))
    return (await queue.enqueue(job, None, "d", account=account)).outcome


async def run(queue: WorkerQueue, count: int) -> list[Job]:
    """To their ends, a token each, in the order in which they were claimed."""
    ran = list[Job]()
    while len(ran) < count:
        entries = await queue.read("w", min(MAX_JOBS_A_CALL, count - len(ran)))
        assert entries, f"nothing to read after {len(ran)} of {count}"
        ran += await asyncio.gather(*(_run(queue, entry) for entry in entries))
    return ran


async def _run(queue: WorkerQueue, entry: Entry) -> Job:
    taken = await queue.start("w", entry)
    assert taken is not None
    made = deltas(taken.job.job_id, 1)
    assert await queue.finish("w", Ending(taken.job, taken.epoch, made, 0, done(made)))
    return taken.job


def after_their_time(meter: Meter) -> None:
    """Delete what goes by itself, as time would."""
    names = meter.keys()
    pipe = meter.client.pipeline(transaction=False)
    for name in names:
        pipe.ttl(name)
    for name, ttl in zip(names, pipe.execute(), strict=True):
        if ttl >= 0:
            pipe.delete(name)
    pipe.execute()


def check_empty(meter: Meter) -> None:
    """Nothing pending, waiting, counted, or without an end; no list that grew with the jobs."""
    check_leftovers(meter.plain, LANE)
    sizes = {"zset": "zcard", "set": "scard", "hash": "hlen", "stream": "xlen", "list": "llen"}
    for name in meter.keys(lambda key: not key.startswith((LANE.job("job_"), f"{LANE.prefix}acc"))):
        if kind := sizes.get(meter.client.type(name)):
            assert meter.client.execute_command(kind, name) <= FEW, name


async def costs(queue: WorkerQueue, meter: Meter, first: int) -> dict[str, Cost]:
    """Of each kind of call, with the lane as full as it is."""
    meter.begin()
    await submit(queue, 100, first)
    found = {"enqueue": meter.cost().over(100)}
    job = a_job(tenant="asks", background=True)
    await queue.enqueue(job, None)
    for name, call in {
        "status": lambda: queue.status("asks", job.job_id),
        "counts": queue.counts,
        "sweep": queue.sweep,
        "reap": queue.reap,
        "beat": lambda: queue.beat("w"),
        "cancel": lambda: queue.cancel("asks", job.job_id),
        "a job's way": lambda: run(queue, 100),
    }.items():
        meter.begin()
        await call()
        found[name] = meter.cost().over(100 if name == "a job's way" else 1)
    return found


@pytest.mark.slow
def test_ten_thousand_queued_jobs_of_a_thousand_tenants_cost_as_much_each_as_a_hundred(spare):
    async def main() -> None:
        async with lane_at(spare) as (queue, meter):
            memory = meter.memory_bytes()
            short = await costs(queue, meter, 0)
            jobs = await submit(queue, NUM_JOBS - 101, 100)
            deep = await costs(queue, meter, NUM_JOBS - 1)
            for name, cost in deep.items():
                print(f"{name}: {short[name]} with 100, {cost} with {NUM_JOBS:,}")
                assert cost.commands <= 2 * short[name].commands + 10, name
                assert cost.script_us <= 10 * short[name].script_us + 2000, name  # O(n): 100 times
            assert (await queue.counts()).num_queued == NUM_JOBS - 101
            meter.begin()
            ran = await run(queue, NUM_JOBS // 2)
            print(f"the longest call: {meter.cost().longest_us} us")
            check_fair(ran)
            for at in range(0, len(jobs), AT_ONCE):
                ends = (queue.cancel(job.tenant, job.job_id) for job in jobs[at : at + AT_ONCE])
                await asyncio.gather(*ends)
            await run(queue, (await queue.counts()).num_queued)
            counts = await queue.counts()
            assert (counts.num_ended, counts.num_queued, counts.num_running) == (10_101, 0, 0)
            assert len({job.job_id for job in ran}) == len(ran)
            check_empty(meter)
            after_their_time(meter)
            assert meter.memory_bytes() < memory + 1_000_000

    asyncio.run(main())


def check_fair(ran: list[Job]) -> None:
    """At no time has one tenant had more than two jobs more than another; all have some left."""
    had = Counter(dict.fromkeys({f"t{number}" for number in range(NUM_TENANTS)}, 0))
    for number, job in enumerate(ran):
        had[job.tenant] += 1
        if number % 500 == 0:
            counts = sorted(had.values())
            assert counts[-1] - counts[0] <= 2, (number, counts[0], counts[-1])


def test_blocked_accounts_cost_a_call_no_more_than_so_many_commands(spare):
    """A thousand accounts with one job running each, and nine waiting."""

    async def main() -> None:
        async with lane_at(spare) as (queue, meter):
            await submit(queue, 3 * NUM_TENANTS, max_running=1)
            claimed = list[Entry]()
            longest = Cost(0, 0)
            while len(claimed) < NUM_TENANTS:
                meter.begin()
                entries = await queue.read("w", MAX_JOBS_A_CALL)
                longest = max(longest, meter.cost(), key=lambda cost: cost.commands)
                assert entries
                claimed += entries
            for _ in range(10):
                meter.begin()
                assert await queue.read("w", MAX_JOBS_A_CALL) == []
                longest = max(longest, meter.cost(), key=lambda cost: cost.commands)
            print(f"the longest read: {longest}")
            assert longest.commands < MOST_COMMANDS
            assert len({entry.job_id for entry in claimed}) == NUM_TENANTS
            meter.begin()
            assert (await queue.counts()).by_reason == {"running": 2 * NUM_TENANTS}
            calls = meter.client.info("commandstats")["cmdstat_evalsha"]["calls"]
            print(f"counts: {meter.cost()} in {calls} calls")
            assert meter.cost().commands < calls * 500

    asyncio.run(main())


@pytest.mark.slow
def test_ten_thousand_workers_come_and_go_and_leave_nothing(spare):
    """Half leave in order, a quarter crash, and of a quarter the lease lapses, all at once."""

    async def live(queue: WorkerQueue, number: int) -> None:
        name = f"w{number}"
        await queue.register(name, WorkerCard(host="somewhere"))
        if number % 2:
            await queue.read(name, 1)
        if number % 4:
            await queue.unregister(name, crashed=number % 4 == 1)

    async def main() -> None:
        async with lane_at(spare) as (queue, meter):
            await live(queue, 1)
            before, memory = set(meter.keys()), meter.memory_bytes()
            for at in range(0, NUM_TIMES, AT_ONCE):
                numbers = range(at, min(NUM_TIMES, at + AT_ONCE))
                await asyncio.gather(*(live(queue, number) for number in numbers))
            workers = f"{LANE.prefix}workers"
            lapsed = [name for name, _ in meter.client.zscan_iter(workers) if name != "w"]
            assert len(lapsed) == NUM_TIMES // 4
            meter.client.zadd(workers, dict.fromkeys(lapsed, 1))
            longest = Cost(0, 0)
            while meter.client.zcard(workers) > 1:
                meter.begin()
                await queue.reap()
                longest = max(longest, meter.cost(), key=lambda cost: cost.commands)
            print(f"the longest reap: {longest}")
            assert longest.commands < MOST_COMMANDS
            await queue.reap()
            assert set(meter.keys()) == before
            for ready in ("suspect", "resume", "high", "normal", "batch"):
                if meter.client.exists(LANE.ready(ready)):
                    names = meter.client.xinfo_consumers(LANE.ready(ready), "workers")
                    assert {each["name"] for each in names} <= {"w"}
            assert meter.memory_bytes() < memory + 500_000
            check_empty(meter)

    asyncio.run(main())


def test_ten_thousand_repeats_of_a_submission_are_one_job_and_cost_nothing_later(spare):
    async def main() -> None:
        async with lane_at(spare) as (queue, meter):
            job = a_job(job_id=LANE.idempotent_job_id("default", "k"), background=True)
            first = await queue.enqueue(job, None)
            before, memory = set(meter.keys()), meter.memory_bytes()
            answers = Counter[Outcome]()
            for _ in range(NUM_TIMES // AT_ONCE + 1):
                calls = (queue.enqueue(job, None) for _ in range(AT_ONCE))
                answers.update(answer.outcome for answer in await asyncio.gather(*calls))
            assert first.outcome is Outcome.ACCEPTED
            assert set(answers) == {Outcome.DUPLICATE} and answers.total() >= NUM_TIMES
            assert set(meter.keys()) == before
            assert meter.memory_bytes() < memory + 100_000
            await run(queue, 1)
            assert (await queue.counts()).num_ended == 1
            assert (await queue.enqueue(job, None)).outcome is Outcome.DUPLICATE
            check_empty(meter)

    asyncio.run(main())


@on_a_lane
async def test_after_an_hour_without_a_worker_tenants_still_take_turns(queue: WorkerQueue) -> None:
    """What was computed for them is forgotten by then; their place in the turns is not."""
    for tenant in ("a", "b"):
        for _ in range(12):
            await queue.enqueue(a_job(tenant=tenant, background=True), None)
    await run(queue, 8)
    server = plain(queue.connection.redis)
    served = await server.keys(f"{LANE.prefix}served:*")
    assert len(served) == 2
    for key in served:
        assert 0 < await server.ttl(key) <= 3600
    fair = {"a": 500_000, "b": 500_000}
    await server.zadd(f"{LANE.prefix}fair:normal", fair)
    await server.delete(*served)
    assert Counter(job.tenant for job in await run(queue, 8)) == {"a": 4, "b": 4}


@pytest.mark.slow
def test_a_batch_whose_housekeeping_is_killed_in_the_middle_answers_every_line_once():
    """`make big-batch` does the same with fifty thousand lines."""
    assert run_batch(1500).num_lines == 1500
