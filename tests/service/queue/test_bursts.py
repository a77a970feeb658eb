"""No burst and no number of lanes passes what may be used in a minute, run, or wait in a lane."""

import asyncio

import pytest
from test_limits import account_field, limited, minute_passes, submit, used

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Quota
from penstock.schemas.delivery import Commit, Outcome
from penstock.schemas.errors import QueueFull
from penstock.schemas.job import Job
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.refusal import refusal
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from plain import plain
from scripted import LANE, a_job, deltas, finish, on_a_lane, started
from stepped import SteppedWorker


def bound(**fields: object) -> int:
    """Tokens that such a job draws from its minute."""
    job = a_job(background=True, **fields)
    return job.guess_prompt_tokens(len(job.dump())) + job.guess_completion_tokens()


@on_a_lane
async def test_a_burst_draws_what_it_may_use_and_counts_at_last_what_it_used(
    queue: WorkerQueue,
) -> None:
    """Ten of 200 at once get in, and end in every way: the minute holds what the ledger holds."""
    account = limited(tokens_per_minute=10 * bound())
    jobs = [a_job(background=True) for _ in range(200)]
    answers = await asyncio.gather(
        *(queue.enqueue(job, None, "d", account=account) for job in jobs)
    )
    mine = [
        job for job, answer in zip(jobs, answers, strict=True) if answer.outcome is Outcome.ACCEPTED
    ]
    assert len(mine) == 10
    assert {answer.reason for answer in answers} == {"", "tokens_per_minute"}
    assert await account_field(queue, "tokens") == 10 * bound()
    redis = plain(queue.connection.redis)
    cancelled, erased, late = mine[:3]
    await queue.cancel("default", cancelled.job_id)
    await queue.delete("default", erased.job_id)
    await redis.hset(LANE.job(late.job_id), "deadline", 1)
    await redis.zadd(f"{LANE.prefix}deadlines", {late.job_id: 1})
    await queue.sweep()
    assert await account_field(queue, "tokens") == 7 * bound()
    worker = SteppedWorker(queue, 7)
    await worker.step()
    assert await account_field(queue, "tokens") == 7 * bound()
    released, died, *_ = worker.running
    await queue.release("w", [released])
    await queue.unregister("w", crashed=True)
    await queue.cancel("default", died)
    last = SteppedWorker(queue, 7, "v")
    await last.register()
    while len(last.ended) < 6:
        await last.step()
    day = await used(queue)
    tokens = day["prompt_tokens"] + day["completion_tokens"]
    assert tokens == 7 + 6 * 16 + 1
    assert await account_field(queue, "tokens") == tokens
    rates = await queue.rates("key")
    assert rates.tokens_left == 10 * bound() - tokens


@on_a_lane
async def test_more_than_was_drawn_counts_and_what_an_older_minute_drew_does_not(
    queue: WorkerQueue,
) -> None:
    account = limited(tokens_per_minute=1000)
    for _ in range(3):
        assert (await submit(queue, account)).outcome is Outcome.ACCEPTED
    wordy, lazy, later = [await started(queue) for _ in range(3)]
    made = deltas(wordy.job.job_id, 300)
    await queue.commit("w", [Commit(wordy.job.job_id, wordy.epoch, made, 100, 0)])
    assert await account_field(queue, "tokens") == 400 + 2 * bound()
    await finish(queue, lazy, deltas(lazy.job.job_id, 1))
    assert await account_field(queue, "tokens") == 402 + bound()
    await minute_passes(queue)
    assert (await submit(queue, account)).outcome is Outcome.ACCEPTED
    await finish(queue, later, deltas(later.job.job_id, 1))
    assert await account_field(queue, "tokens") == bound()


@on_a_lane
async def test_who_waits_for_tokens_begins_when_a_job_gives_back_what_it_did_not_use(
    queue: WorkerQueue,
) -> None:
    account, big = limited(tokens_per_minute=1000), {"params": {"max_tokens": 900}}
    for _ in range(2):
        answer = await submit(queue, account, over_limit="wait", **big)
        assert answer.outcome is Outcome.ACCEPTED
    first = await started(queue)
    assert await queue.read("w", 1) == []
    await finish(queue, first, deltas(first.job.job_id, 5))
    await started(queue)


@on_a_lane
async def test_of_ten_times_what_may_wait_no_more_does_and_all_that_was_accepted_ends(
    queue: WorkerQueue,
) -> None:
    """Prompts of 100 tokens, a lane of 1000: whoever is refused comes again when it was told to."""
    redis = plain(queue.connection.redis)
    jobs = [a_job(prompts=[[7] * 100], params={"max_tokens": 1}) for _ in range(100)]
    worker, refused, turns = SteppedWorker(queue, 4), jobs, 0

    async def submit_all(some: list[Job]) -> list[Job]:
        answers = await asyncio.gather(
            *(queue.enqueue(job, None, "d", max_queued_tokens=1000) for job in some)
        )
        for answer in answers:
            if answer.outcome is not Outcome.ACCEPTED:
                assert (answer.outcome, answer.reason) == (Outcome.FULL, "tokens")
                assert 100 <= answer.retry_after_ms <= 60_000
                assert isinstance(refusal(answer, jobs[0]), QueueFull)
        return [
            job
            for job, answer in zip(some, answers, strict=True)
            if answer.outcome is not Outcome.ACCEPTED
        ]

    while refused and turns < 100:
        refused, turns = await submit_all(refused), turns + 1
        counts = await queue.counts()
        assert counts.num_queued == min(10, len(jobs) - len(worker.ended))
        assert int(await redis.hget(f"{LANE.prefix}counts", "queued_tokens")) <= 1000
        await worker.step()
    while len(worker.ended) < len(jobs):
        await worker.step()
    assert int(await redis.hget(f"{LANE.prefix}counts", "queued_tokens")) == 0
    await queue.enqueue(a_job(prompts=[[7] * 5000]), None, "d", max_queued_tokens=1000)
    assert (await queue.counts()).num_queued == 1


def test_lanes_share_the_limits_of_a_model_and_no_more() -> None:
    whole = Quota(max_running=10, requests_per_minute=7, weight=2)
    shares = [whole.share(4, number) for number in range(4)]
    assert [share.max_running for share in shares] == [3, 3, 2, 2]
    assert [share.requests_per_minute for share in shares] == [2, 2, 2, 1]
    assert {share.weight for share in shares} == {2}
    few = Quota(max_running=3, tokens_per_minute=1000)
    assert few.num_lanes(4) == 3
    assert [few.share(4, number).max_running for number in range(4)] == [1, 1, 1, 1]
    assert sum(few.share(4, number).tokens_per_minute or 0 for number in range(3)) == 1000
    assert Quota().num_lanes(4) == 4 and Quota().share(4, 3) == Quota()


@pytest.mark.parametrize("most", [10, 3])
def test_no_more_run_over_four_lanes_than_the_limit_says(redis_url: str, most: int) -> None:
    async def main() -> None:
        async with QueueClient.from_url(redis_url) as client:
            card = ModelCard(name="wide", lanes=4)
            await Registry(client.redis).register(card)
            account = limited(max_running=most)
            for number in range(100):
                await client.enqueue([number], model="wide", background=True, account=account)
            claimed = 0
            for queue in await client.queues():
                worker = WorkerQueue(client.redis, queue.lane)
                await worker.register("w", WorkerCard())
                claimed += len(await worker.read("w", 64) or [])
            assert claimed == most

    asyncio.run(main())
