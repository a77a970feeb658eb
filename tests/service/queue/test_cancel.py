"""A cancelled job is computed for no more than the step under way and two, whoever cancels it.

The supervisor is stopped meanwhile: its beats say who was cancelled too, a second later.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.params.sampling import SamplingParams
from plain import plain
from stage import GatewayProcess
from worker_process import WorkerProcess, ask

STEP_S = 0.25
FLAGS = (
    *("--lease-ttl-ms", "60000", "--step-timeout-s", "300"),
    *("--fake-step-ms", str(STEP_S * 1000)),
    *("--max-num-batched-tokens", "64", "--max-model-len", "16000"),
)
PROMPTS = {"decode": "x", "prefill": "x" * 8000}  # 125 steps of prefill
MAX_TOKENS = 4000


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[WorkerProcess]:
    with WorkerProcess(server.url, "fake", *FLAGS) as worker:
        yield worker.ready()


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[GatewayProcess]:
    with GatewayProcess(server.url) as gateway:
        yield gateway


async def is_so(look: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(2000):
        if await look():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited in vain for: {what}")


async def stats(client: QueueClient) -> dict[str, int]:
    [queue] = await client.queues()
    [worker] = await queue.workers()
    told = {name: int(str(worker.stats.get(name, 0))) for name in ("num_steps", "prompt_tokens")}
    return told | {"num_running": int(str(worker.stats.get("num_running", 0)))}


async def further_steps(
    client: QueueClient, worker: WorkerProcess, prompt: str, job: Callable[[], Awaitable[None]]
) -> float:
    """Steps that computed `job`, less those that there was time for until it was let go."""
    [queue] = await client.queues()
    before, num_ended = await stats(client), (await queue.counts()).num_ended

    async def runs() -> bool:
        return (await queue.counts()).num_running == 1

    async def has_ended() -> bool:
        return (await queue.counts()).num_ended > num_ended

    async def is_idle() -> bool:
        now = await stats(client)
        has_begun = now["prompt_tokens"] >= before["prompt_tokens"] + len(prompt)
        return has_begun and not now["num_running"]

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    asked = asyncio.create_task(job())
    await is_so(runs, "a worker to take it up")
    await asyncio.sleep(4 * STEP_S)
    worker.process.send_signal(signal.SIGSTOP)
    try:
        asked.cancel()
        await asyncio.wait([asked])
        until_s = loop.time() - began_s
        await is_so(has_ended, "its end")
    finally:
        worker.process.send_signal(signal.SIGCONT)
    await is_so(is_idle, "the engine to be empty")
    return (await stats(client))["num_steps"] - before["num_steps"] - until_s / STEP_S


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_cancelled_job_is_computed_for_two_steps_more_at_most(worker, prompt):
    async def asks(client: QueueClient) -> None:
        async def job() -> None:
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            job_id = await client.enqueue(prompt, params=params, background=True)
            try:
                await asyncio.Event().wait()
            finally:
                await client.cancel(job_id)

        assert await further_steps(client, worker, prompt, job) <= 3

    ask(worker.url, asks)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_so_is_one_whose_caller_hangs_up(worker, gateway, prompt):
    async def asks(client: QueueClient) -> None:
        async def job() -> None:
            body = {
                "model": "fake",
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            async with httpx.AsyncClient(timeout=300) as http:
                url = f"{gateway.url}/v1/completions"
                async with http.stream("POST", url, json=body) as answer:
                    async for _ in answer.aiter_raw():
                        pass

        assert await further_steps(client, worker, prompt, job) <= 3

    ask(worker.url, asks)


def test_a_prefill_whose_time_is_up_ends_by_the_workers_own_clock(worker):
    """No commit, no beat and no message says so."""
    timeout_s = 3.0

    async def asks(client: QueueClient) -> None:
        async def job() -> None:
            await client.enqueue(
                PROMPTS["prefill"], background=True, timeout_ms=int(timeout_s * 1000)
            )
            await asyncio.Event().wait()

        further = await further_steps(client, worker, PROMPTS["prefill"], job)
        assert further <= timeout_s / STEP_S + 3

    ask(worker.url, asks)


def test_without_its_channel_the_worker_hears_of_it_with_the_next_beat(worker):
    """Nor does it mind what others say there."""

    async def asks(client: QueueClient) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        job_id = await client.enqueue(PROMPTS["prefill"], params=params, background=True)
        [queue] = await client.queues()
        [status] = await queue.workers()
        channel, redis = queue.lane.control(status.worker), plain(client.redis)

        async def runs() -> bool:
            return (await queue.counts()).num_running == 1

        async def is_cancelled() -> bool:
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            return (await client.status(job_id)).state == "cancelled"

        await is_so(runs, "a worker to take it up")
        for text in ("", "C", "K " + job_id, "C nobody", b"\xff\x00"):
            assert await redis.publish(channel, text) == 1
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await client.cancel(job_id)
        await is_so(is_cancelled, "the end")

        async def hears() -> bool:
            return await redis.publish(channel, "") == 1

        await is_so(hears, "the worker to come back to its channel")

    ask(worker.url, asks)
