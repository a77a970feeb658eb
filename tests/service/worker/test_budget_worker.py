"""A budget that ends in the middle of a job, through a real worker and its text."""

from datetime import UTC, datetime, timedelta

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Account, Quota
from penstock.schemas.event import Result
from penstock.schemas.job import Job
from penstock.schemas.params.sampling import SamplingParams
from worker_process import WorkerProcess, ask


def test_a_job_of_a_real_worker_stops_at_its_budget() -> None:
    with Server() as server, WorkerProcess(server.url, "fake", "--fake-step-ms", "1") as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            account = Account(name="key", limits=Quota(tokens_per_day=300))
            job_ids = []
            for _ in range(3):
                params = SamplingParams(max_tokens=500, ignore_eos=True, n=2)
                job_id = await client.name_job("fake")
                job = Job(job_id=job_id, model="fake", prompts=["hello"], params=params)
                await client.submit(job, account)
                job_ids.append(job_id)
            results = [await client.result(job_id) for job_id in job_ids]
            total = 0
            for result in results:
                assert result and result.state == "succeeded"
                total += result.usage.completion_tokens + result.usage.prompt_tokens
                made = sum(len(choice.token_ids) for choice in result.choices)
                assert result.usage.completion_tokens == made
                assert {choice.finish_reason for choice in result.choices} == {"budget"}
            assert total == 300

        ask(server.url, asks)


def test_a_prompt_beyond_the_budget_ends_with_the_time_of_its_renewal() -> None:
    with Server() as server, WorkerProcess(server.url, "fake") as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            for limits in (Quota(tokens_per_day=5), Quota(tokens_per_month=5)):
                account = Account(name=f"key {limits}", limits=limits)
                job_id = await client.enqueue("a longer prompt", background=True, account=account)
                result, now = await client.result(job_id), datetime.now(UTC)
                assert result and result.error and result.error.code == "budget_exceeded"
                assert "15 tokens; the account's budget has 5 left" in result.error.message
                assert result.error.reset_at
                renews = datetime.fromtimestamp(result.error.reset_at, UTC)
                days = 1 if limits.tokens_per_day else 31
                assert now < renews <= now + timedelta(days=days)
                assert f"{renews:%X}" == "00:00:00" and (days == 1 or renews.day == 1)

        ask(server.url, asks)


def test_answers_that_are_drawn_and_not_shown_are_charged_too() -> None:
    """16 answers of 100 tokens, of which one is shown, are 1,600 of a day's 5,000."""
    with Server() as server, WorkerProcess(server.url, "fake", "--fake-step-ms", "1") as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            account = Account(name="key", limits=Quota(tokens_per_day=5000))

            async def run(best_of: int, max_tokens: int) -> Result:
                params = SamplingParams(
                    max_tokens=max_tokens, ignore_eos=True, best_of=best_of, n=1
                )
                job_id = await client.enqueue(
                    "hello", params=params, background=True, account=account
                )
                result = await client.result(job_id)
                assert result is not None
                return result

            totals = []
            for _ in range(2):
                result = await run(16, 100)
                assert result.state == "succeeded" and len(result.choices) == 1
                assert result.usage.completion_tokens == 1600
                assert len(result.choices[0].token_ids) == 100
                totals.append(result.usage.prompt_tokens + 1600)
            refused = await run(20, 100)
            assert refused.error and refused.error.code == "budget_exceeded"
            assert refused.error.param == "best_of"
            assert "20 answers drawn to each prompt may take 2005 tokens" in refused.error.message
            assert f"budget has {5000 - sum(totals)} left" in refused.error.message
            result = await run(1, 5000)
            made = result.usage.prompt_tokens + result.usage.completion_tokens
            assert made == 5000 - sum(totals)

        ask(server.url, asks)
