"""A job that kills workers ends in the dead-letter list; whoever was beside it is not charged."""

import asyncio

import pytest

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import Commit, Started
from penstock.schemas.event import Failed
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, delta, finish, on_a_lane, redis_of
from worker_process import WorkerProcess, ask, same

NO_END = 2**31 - 1  # where a trial is passed that lasts to the job's end


async def take(
    queue: WorkerQueue, worker: str, count: int = 1, alone: bool = True
) -> list[Started]:
    """What a new worker of that name reads, taken up."""
    await queue.register(worker, WorkerCard())
    entries = await queue.read(worker, count, alone=alone) or []
    return [taken for entry in entries if (taken := await queue.start(worker, entry))]


async def step(queue: WorkerQueue, worker: str, taken: Started, num_tokens: int = 1) -> None:
    new = delta(taken.job.job_id, taken.position, num_tokens)
    await queue.commit(worker, [Commit(taken.job.job_id, taken.epoch, [new])])


async def lapse(queue: WorkerQueue, worker: str) -> None:
    await redis_of(queue).zadd(f"{LANE.prefix}workers", {worker: 1})
    await queue.reap()


async def fields(queue: WorkerQueue, job_id: str) -> dict[str, str]:
    pairs = await redis_of(queue).hgetall(LANE.job(job_id))
    return {name.decode(): value.decode() for name, value in pairs.items()}


@on_a_lane
async def test_a_job_dies_after_two_crashes_met_alone(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    for number in range(3):
        [taken] = await take(queue, f"a{number}")
        assert taken.job == job and taken.epoch == number + 1
        assert taken.trial == (None if number == 0 else 1)
        await queue.unregister(f"a{number}", crashed=True)
    status = await queue.status("default", job.job_id)
    assert status.state == "dead"
    page = await queue.attach("default", job.job_id, "c", 0)
    [end] = page.events
    assert isinstance(end, Failed) and (end.state, end.error.code) == ("dead", "worker_crashed")
    assert (end.error.status, end.error.retryable) == (500, False)
    assert await take(queue, "later") == []
    counts = await queue.counts()
    assert (counts.num_queued, counts.num_running, counts.num_ended) == (0, 0, 1)
    totals = {"crashed": 3, "lapsed": 0, "reaped": 3, "requeued": 2, "buried": 1}
    assert (counts.num_dead_letters, counts.totals) == (1, totals)


@on_a_lane
async def test_a_lease_that_lapsed_weighs_half_of_a_crash(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    for number in range(5):
        assert len(await take(queue, f"a{number}")) == 1
        await lapse(queue, f"a{number}")
    assert (await queue.status("default", job.job_id)).state == "dead"


@on_a_lane
async def test_who_was_beside_is_tried_alone_and_not_charged(queue: WorkerQueue) -> None:
    """Eight in one crash, five of which have given tokens: three are tried, one after another."""
    jobs = [a_job() for _ in range(8)]
    for job in jobs:
        await queue.enqueue(job, None, "d")
    for taken in (await take(queue, "a", 8))[:5]:
        await step(queue, "a", taken)
    await queue.unregister("a", crashed=True)
    tried = []
    for number in range(3):
        [taken] = await take(queue, f"b{number}", 8)
        assert taken.trial == 1 and taken.position == 0
        tried.append(taken.job.job_id)
        await step(queue, f"b{number}", taken)
    assert set(tried) == {job.job_id for job in jobs[5:]}
    rest = await take(queue, "c", 8)
    assert {one.job.job_id for one in rest} == {job.job_id for job in jobs[:5]}
    assert {one.trial for one in rest} == {None}
    await queue.unregister("b0", crashed=True)  # passed: it was no suspect any more
    assert "blame" not in await fields(queue, tried[0])
    assert [one.trial for one in await take(queue, "d", 8)] == [None]


@on_a_lane
async def test_several_that_crash_die_and_nobody_else(queue: WorkerQueue) -> None:
    jobs = [a_job() for _ in range(20)]
    poison = {jobs[at].job_id for at in (2, 11, 19)}
    for job in jobs:
        await queue.enqueue(job, None, "d")
    crashes = 0
    for number in range(100):
        held = await take(queue, f"w{number}", 8)
        if any(taken.job.job_id in poison for taken in held):
            crashes += 1
            await queue.unregister(f"w{number}", crashed=True)
            continue
        for taken in held:
            assert await finish(queue, taken, [delta(taken.job.job_id, 0)], f"w{number}")
        if not held:
            break
    states = {job.job_id: (await queue.status("default", job.job_id)).state for job in jobs}
    assert {job_id for job_id, state in states.items() if state == "dead"} == poison
    assert set(states.values()) == {"dead", "succeeded"} and crashes <= 9
    for job in jobs:
        assert ("blame" in await fields(queue, job.job_id)) == (job.job_id in poison)


@on_a_lane
async def test_a_worker_that_leaves_charges_nobody(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    assert await take(queue, "a")
    await queue.unregister("a", crashed=True)
    for number in range(6):
        [taken] = await take(queue, f"b{number}")
        assert taken.trial == 1
        if number % 2:
            await queue.release(f"b{number}", [job.job_id])
        await queue.unregister(f"b{number}")
    assert (await fields(queue, job.job_id)).get("blame") is None


@on_a_lane
async def test_a_claim_that_was_not_taken_up_is_not_charged(queue: WorkerQueue) -> None:
    await queue.enqueue(a_job(), None, "d")
    for number in range(6):
        await queue.register(f"a{number}", WorkerCard())
        [entry] = await queue.read(f"a{number}", 1, alone=True) or []
        assert not entry.is_suspect
        await queue.unregister(f"a{number}", crashed=True)
    [taken] = await take(queue, "b")
    assert taken.trial is None


@on_a_lane
async def test_a_suspect_that_nobody_has_read_is_nobodys_to_hand_back(queue: WorkerQueue) -> None:
    """Its stream has no group of readers yet."""
    job = a_job()
    await queue.enqueue(job, None, "d")
    await take(queue, "a")
    await queue.unregister("a", crashed=True)
    await queue.register("b", WorkerCard())
    assert (await fields(queue, job.job_id))["ready"] == "suspect"
    for worker in ("a", "b"):
        assert await queue.release(worker, [job.job_id]) == 0
    [taken] = await take(queue, "c")
    assert (taken.job, taken.trial) == (job, 1)


@on_a_lane
async def test_a_cancelled_suspect_ends_as_cancelled(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    for number in range(3):
        await take(queue, f"a{number}")
        if number == 2:
            await queue.cancel("default", job.job_id)
        await queue.unregister(f"a{number}", crashed=True)
    assert (await queue.status("default", job.job_id)).state == "cancelled"


@on_a_lane
async def test_a_job_that_crashes_workers_later_does_not_loop_for_ever(queue: WorkerQueue) -> None:
    """Each time it gets a token further; then it has to get further alone, and then to its end."""
    job = a_job()
    await queue.enqueue(job, None, "d")
    trials = []
    for number in range(20):
        got = await take(queue, f"a{number}")
        if not got:
            break
        trials.append(got[0].trial and got[0].trial - got[0].position)
        await step(queue, f"a{number}", got[0])
        await queue.unregister(f"a{number}", crashed=True)
    assert trials == [None, None, None, None, 64, 64]
    assert (await queue.status("default", job.job_id)).state == "dead"


@on_a_lane
async def test_a_job_that_passes_its_trials_and_crashes_workers_later_runs_alone_to_its_end(
    queue: WorkerQueue,
) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    for number in range(10):
        [taken] = await take(queue, f"a{number}")
        assert (taken.trial == NO_END) == (number >= 8)
        await step(queue, f"a{number}", taken, 70)
        await queue.unregister(f"a{number}", crashed=True)
    assert (await queue.status("default", job.job_id)).state == "dead"


@on_a_lane
async def test_a_bystander_of_many_crashes_passes_a_short_trial(queue: WorkerQueue) -> None:
    job = a_job()
    await queue.enqueue(job, None, "d")
    for number in range(4):
        [taken] = await take(queue, f"a{number}")
        await step(queue, f"a{number}", taken)
        await queue.unregister(f"a{number}", crashed=True)
    [taken] = await take(queue, "b")
    assert taken.trial == 4 + 64
    await step(queue, "b", taken, 64)
    await queue.unregister("b")
    [taken] = await take(queue, "c")
    assert taken.trial is None and (await fields(queue, job.job_id)).get("blame") is None


@on_a_lane
async def test_a_suspect_waits_for_an_empty_worker_which_is_made_if_need_be(
    queue: WorkerQueue,
) -> None:
    await queue.enqueue(a_job(), None, "d")
    await take(queue, "a")
    await queue.unregister("a", crashed=True)
    await queue.enqueue(a_job(), None, "d")
    assert len(await take(queue, "busy", 4, alone=False)) == 1 and not queue.must_be_empty
    assert await queue.read("busy", 4) == [] and not queue.must_be_empty
    await queue.register("other", WorkerCard())
    async with asyncio.timeout(30):
        while not queue.must_be_empty:
            assert await queue.read("busy", 4) == []
            await asyncio.sleep(0.05)
    assert await queue.read("other", 4) == [] and not queue.must_be_empty  # one at a time is asked
    assert await queue.read("busy", 4) == [] and queue.must_be_empty
    [entry] = await queue.read("busy", 4, alone=True) or []
    assert entry.is_suspect and not queue.must_be_empty


def letters(queue: WorkerQueue) -> object:
    return redis_of(queue).xrange(f"{LANE.prefix}dead")


@on_a_lane
async def test_a_dead_letter_says_all_but_the_text(queue: WorkerQueue) -> None:
    job = a_job(prompts=["CANARY-2718"], metadata={"k": "CANARY-2718"})
    await queue.enqueue(job, None, "the digest")
    for number in range(3):
        await take(queue, f"a{number}")
        await queue.unregister(f"a{number}", crashed=True)
    [(_, letter)] = await letters(queue)
    assert b"CANARY" not in b"".join(letter.values())
    told = {name.decode(): value.decode() for name, value in letter.items()}
    assert told["job"] == job.job_id and told["reason"] == "worker_crashed"
    assert told["workers"] == "a0 a1 a2" and told["deliveries"] == told["crashes"] == "3"
    assert told["digest"] == "the digest" and told["blame"] == "4"
    assert int(told["request_bytes"]) == len(job.dump())
    week = 7 * 24 * 3600
    for key in (f"{LANE.prefix}dead", f"{LANE.job(job.job_id)}:request", LANE.job(job.job_id)):
        assert week - 600 < await redis_of(queue).ttl(key) <= week
    await queue.delete("default", job.job_id)
    assert await letters(queue) == []
    assert await redis_of(queue).keys(f"*{job.job_id}*") == []


@pytest.mark.slow
def test_a_suspect_is_not_charged_for_a_step_that_another_hangs_in(redis_url, offline):
    """A worker is asked to become empty for it while its engine hangs, and does not pretend to."""
    flags = ("--fake-poison", "poison", "--lease-ttl-ms", "3000", "--step-timeout-s", "6")
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)

    async def asks(client: QueueClient) -> None:
        queue = WorkerQueue(client.redis, Lane("fake"))
        await Registry(client.redis).register(ModelCard(name="fake"))
        innocent = await client.enqueue("innocent", params=params, background=True)
        [taken] = await take(queue, "scripted")
        assert taken.job.job_id == innocent
        with WorkerProcess(redis_url, "fake", *flags) as worker:
            await meets_poison(client, queue, innocent, worker.ready())

    async def meets_poison(
        client: QueueClient, queue: WorkerQueue, innocent: str, worker: WorkerProcess
    ) -> None:
        poison = await client.enqueue("poison:hang:5", params=params, background=True)
        while (await client.status(poison)).num_tokens < 5:
            await queue.beat("scripted")
            await asyncio.sleep(0.02)
        await queue.unregister("scripted", crashed=True)  # so the innocent is a suspect
        while (await queue.counts()).totals["crashed"] < 2:
            await asyncio.sleep(0.02)
        assert "engine did not move" in worker.logged()
        assert await plain(client.redis).hget(Lane("fake").job(innocent), "blame") is None
        await client.cancel(poison)
        same(await client.result(innocent), offline.generate("innocent", params)[0])

    ask(redis_url, asks)


FLAGS = ("--fake-poison", "poison", "--lease-ttl-ms", "3000", "--max-num-seqs", "64")


@pytest.mark.slow
def test_a_poison_job_among_others_dies_and_all_others_are_whole(redis_url, offline):
    params = SamplingParams(max_tokens=100, ignore_eos=True, seed=4)
    prompts = [f"innocent {number}" for number in range(63)]
    expected = offline.generate(prompts, [params] * len(prompts))
    with (
        WorkerProcess(redis_url, "fake", *FLAGS) as first,
        WorkerProcess(redis_url, "fake", *FLAGS) as second,
    ):

        async def asks(client: QueueClient) -> None:
            jobs = [
                await client.enqueue(prompt, params=params, background=True)
                for prompt in [*prompts[:20], "poison:crash:0", *prompts[20:]]
            ]
            dead = await client.result(jobs.pop(20))
            assert dead and dead.state == "dead" and dead.error
            assert dead.error.code == "worker_crashed"
            for job_id, output in zip(jobs, expected, strict=True):
                same(await client.result(job_id), output)
            counts = plain(client.redis).hmget(f"{Lane('fake').prefix}counts", "crashed", "lapsed")
            assert await counts == [b"3", None]

        first.ready()
        second.ready()
        ask(redis_url, asks)
