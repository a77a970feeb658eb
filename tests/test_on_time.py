"""What is promised by the clock: a job begins when it may, a worker told twice to go lets go."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.server import Server
from gateway.client import Client
from worker_process import WorkerProcess, ask, until

DELAY_MS = 6000  # enough for a restart of everything; on a slow machine the restart takes longer
LET_GO_S = 2.0  # ten times what it may take where nothing else runs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """With its append-only file."""
    with Server(folder=tmp_path / "redis") as server:
        yield server


async def now_ms(client: Client) -> int:
    """By Redis's clock, which counts."""
    seconds, micros = map(int, await client.redis.call("TIME"))
    return seconds * 1000 + micros // 1000


def test_a_delayed_job_begins_on_time_though_redis_and_all_else_are_started_again(server):
    times: dict[str, int] = {}
    ids: dict[str, str] = {}

    async def submit(client: Client) -> None:
        times["due"] = await now_ms(client) + DELAY_MS
        ids["soon"] = await client.enqueue("x", background=True, not_before_ms=times["due"])
        ids["later"] = await client.enqueue("x", background=True, delay_ms=600_000)
        assert (await client.status(ids["soon"])).reason == "delayed"

    async def wait(client: Client) -> None:
        times["ready"] = await now_ms(client)
        result = await client.result(ids["soon"])
        assert result is not None and result.state == "succeeded"
        began_ms = (await client.status(ids["soon"])).started_ms
        assert began_ms is not None
        print(f"began {began_ms - times['due']} ms after it might, ready {times}")
        assert times["due"] <= began_ms < max(times["due"], times["ready"]) + 1000
        assert (await client.status(ids["later"])).reason == "delayed"

    with WorkerProcess(server.url) as worker:
        worker.ready()
        ask(server.url, submit)
        worker.kill()
    server.kill()
    server.start()
    with WorkerProcess(server.url) as worker:
        worker.ready()
        ask(server.url, wait)


def test_a_worker_told_twice_to_go_lets_go_of_all_its_jobs_at_once(server):
    flags = ("--drain-s", "600", "--fake-step-ms", "10", "--max-num-seqs", "64")
    with WorkerProcess(server.url, "fake", *flags) as worker:
        worker.ready()

        async def asks(client: Client) -> None:
            params = {"max_tokens": 4000, "ignore_eos": True}
            for number in range(64):
                await client.enqueue(f"job {number}", background=True, **params)
            [queue] = await client.queues()
            while (await queue.counts()).num_running < 64:
                await asyncio.sleep(0.01)
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(until, lambda: "began to drain" in worker.logged(), "draining")
            assert (await queue.counts()).num_running == 64
            worker.process.send_signal(signal.SIGTERM)
            told_s = time.monotonic()
            while (counts := await queue.counts()).num_handed_back < 64:
                assert time.monotonic() < told_s + LET_GO_S, counts
            print(f"let go of 64 jobs after {1000 * (time.monotonic() - told_s):.0f} ms")
            assert counts.num_running == 0
            assert await asyncio.to_thread(worker.process.wait, 100) == 0

        ask(server.url, asks)
