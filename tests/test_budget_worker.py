"""A budget that ends in the middle of a job, through a real worker and its text."""

from compose.server import Server
from gateway.client import Client
from schemas.account import Account, Limits
from schemas.job import Job
from schemas.sampling import SamplingParams
from worker_process import WorkerProcess, ask


def test_a_job_of_a_real_worker_stops_at_its_budget() -> None:
    with Server() as server, WorkerProcess(server.url, "fake", "--fake-step-ms", "1") as worker:
        worker.ready()

        async def asks(client: Client) -> None:
            account = Account(name="key", limits=Limits(tokens_per_day=300))
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
