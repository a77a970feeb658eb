"""Gateways die and stop; callers come back elsewhere, or do not."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
import redis

from faults.processes import System, until
from faults.run import asks, run
from faults.told import Ask
from penstock.gateway.queue_client import QueueClient

WORKER = ("--fake-step-ms", "10", "--max-num-seqs", "128", "--orphan-grace-ms", "3000")


@pytest.fixture
def system() -> Iterator[System]:
    with System() as system:
        system.worker(*WORKER)
        for _ in range(2):
            system.gateway("--ping-s", "1", "--drain-s", "1")
        yield system.ready()


@pytest.mark.slow
def test_a_gateway_is_killed_under_a_hundred_streams_and_their_callers_come_back(system):
    """Each reads on where it was, through the other; none sees a gap or a token twice."""
    run(
        system,
        asks(100, max_tokens=60, by_sdk=False, is_late=False),
        system.gateways[0].kill,
        at_tokens=600,
    )


@pytest.mark.slow
def test_a_gateway_is_told_to_stop_under_a_hundred_streams(system):
    def act() -> None:
        system.gateways[0].terminate()
        assert system.gateways[0].process.wait(60) == 0

    run(system, asks(100, max_tokens=60, by_sdk=False, is_late=False), act, at_tokens=600)


@pytest.mark.slow
def test_foreground_jobs_of_a_killed_gateway_end_when_nobody_comes_back(system):
    """They free their places after a grace; a job in the background runs on."""
    killed = system.gateways[0]

    async def open_streams() -> None:
        body = {"model": "fake", "prompt": "long", "max_tokens": 5000, "stream": True}
        body |= {"ignore_eos": True}
        async with (
            httpx.AsyncClient(timeout=60) as http,
            QueueClient.from_url(system.url) as client,
        ):
            streams = [
                await http.send(
                    http.build_request("POST", f"{killed.url}/v1/completions", json=body),
                    stream=True,
                )
                for _ in range(8)
            ]
            kept = await client.enqueue(
                "kept", model="fake", max_tokens=500, ignore_eos=True, background=True
            )
            killed.kill()
            for stream in streams:
                with pytest.raises(httpx.HTTPError):
                    await stream.aread()
            [queue] = await client.queues()
            while (await queue.counts()).num_running > 0:
                await asyncio.sleep(0.05)
            assert (await client.status(kept)).state == "succeeded"

    asyncio.run(asyncio.wait_for(open_streams(), 100))
    assert states(system) == ["cancelled"] * 8 + ["succeeded"]


@pytest.mark.slow
def test_a_caller_that_hangs_up_during_a_giant_prefill_frees_the_worker(system):
    """Its job is cancelled as its first step ends; the one behind it runs."""
    until(lambda: bool(system.gateway_urls()), "a gateway")
    url = system.gateway_urls()[0]
    body = {"model": "fake", "prompt": "x" * 4000, "max_tokens": 4000, "stream": True}
    engine = system.workers[0].child("penstock.worker.engine_process")

    async def main() -> None:
        async with QueueClient.from_url(system.url) as client, httpx.AsyncClient() as http:
            [queue] = await client.queues()
            os.kill(engine, signal.SIGSTOP)  # the prefill takes for ever
            asking = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
            while (await queue.counts()).num_running < 1:
                await asyncio.sleep(0.02)
            asking.cancel()
            while not fields(system, "cancel"):
                await asyncio.sleep(0.02)
            os.kill(engine, signal.SIGCONT)
            while (await queue.counts()).num_ended < 1:
                await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(main(), 25))  # before the engine counts as wedged
    assert states(system) == ["cancelled"]
    run(system, [Ask(prompt="after", seed=1, max_tokens=20)])


@pytest.mark.slow
def test_a_gateway_that_is_stopped_while_redis_is_frozen_says_that_it_was(system):
    """Who waits for an answer gets one that may be asked for again, elsewhere."""
    gateway = system.gateways[0]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as http:
            path = "/v1/jobs/job_aaaaaa0_" + "a" * 26
            await http.get(gateway.url + path)  # now the lane is known, and only the job is not
            os.kill(system.server.pid, signal.SIGSTOP)
            try:
                asked = asyncio.create_task(http.get(gateway.url + path))
                await asyncio.sleep(0.5)
                gateway.terminate()
                return await asked
            finally:
                os.kill(system.server.pid, signal.SIGCONT)

    reply = asyncio.run(ask())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "gateway_stopped")
    assert reply.headers["x-should-retry"] == "true"
    assert gateway.process.wait(60) == 0


def states(system: System) -> list[str]:
    return fields(system, "state")


def fields(system: System, name: str) -> list[str]:
    """Of all jobs that have it, sorted."""
    with redis.Redis.from_url(system.url, decode_responses=True) as store:
        keys = list(store.scan_iter(f"{system.lane.prefix}job:*"))
        found = [store.hget(key, name) for key in keys if store.type(key) == "hash"]
    return sorted(value for value in found if value is not None)
