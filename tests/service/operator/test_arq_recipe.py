"""A backend that has arq keeps it: its functions enqueue jobs here and await their results."""

import asyncio

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from penstock.gateway.client import Client
from stage import MODEL, Actor

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


async def summarise(ctx: dict[str, object], text: str, traceparent: str) -> str:
    client = ctx["penstock"]
    assert isinstance(client, Client)
    job_id = await client.enqueue(
        text,
        model=MODEL,
        background=True,
        idempotency_key=str(ctx["job_id"]),  # arq may run a function twice
        traceparent=traceparent,
    )
    result = await client.result(job_id)
    assert result is not None
    return result.choices[0].text


def test_a_function_of_arqs_awaits_a_job_and_a_second_run_is_the_same_job(redis_url: str) -> None:
    async def main() -> list[str]:
        async with Client.from_url(redis_url) as client:
            arq = await create_pool(RedisSettings.from_dsn(f"{redis_url[:-1]}1"))
            answers = []
            for _ in range(2):
                asked = await arq.enqueue_job("summarise", "a text", TRACE, _job_id="one")
                assert asked is not None
                worker = Worker(
                    [func(summarise, keep_result=0.5)],
                    redis_pool=arq,
                    ctx={"penstock": client},
                    burst=True,
                    handle_signals=False,
                    poll_delay=0.05,
                )
                await worker.async_run()
                answers.append(await asked.result(timeout=20))
                while await arq.exists("arq:result:one"):
                    await asyncio.sleep(0.05)
            await arq.aclose()
            return answers

    with Actor(redis_url) as actor:
        assert asyncio.run(main()) == ["Hello world", "Hello world"]
        assert [job.traceparent for job in actor.jobs] == [TRACE]
