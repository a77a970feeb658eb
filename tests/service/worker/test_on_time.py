"""What is promised by the clock: a job begins when it may, a worker told to go lets go, and
what is decoded while Redis is away is bounded."""

import asyncio
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from faults.proxy import Proxy
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta
from worker_process import WorkerProcess, ask, until

DELAY_MS = 6000  # enough for a restart of everything; on a slow machine the restart takes longer
LET_GO_S = 2.0  # ten times what it may take where nothing else runs


@pytest.fixture
def disk_server(tmp_path: Path) -> Iterator[Server]:
    """With its append-only file, which is written through: a kill loses nothing."""
    with Server(folder=tmp_path / "redis", options={"appendfsync": "always"}) as server:
        yield server


async def now_ms(client: QueueClient) -> int:
    """By Redis's clock, which counts."""
    seconds, micros = map(int, await client.redis.call("TIME"))
    return seconds * 1000 + micros // 1000


@pytest.mark.slow
def test_a_delayed_job_begins_on_time_though_redis_and_all_else_are_started_again(disk_server):
    times: dict[str, int] = {}
    ids: dict[str, str] = {}

    async def submit(client: QueueClient) -> None:
        times["due"] = await now_ms(client) + DELAY_MS
        ids["soon"] = await client.enqueue("x", background=True, not_before_ms=times["due"])
        ids["later"] = await client.enqueue("x", background=True, delay_ms=600_000)
        assert (await client.status(ids["soon"])).reason == "delayed"

    async def wait(client: QueueClient) -> None:
        times["ready"] = await now_ms(client)
        result = await client.result(ids["soon"])
        assert result is not None and result.state == "succeeded"
        began_ms = (await client.status(ids["soon"])).started_ms
        assert began_ms is not None
        print(f"began {began_ms - times['due']} ms after it might, ready {times}")
        assert times["due"] <= began_ms < max(times["due"], times["ready"]) + 1000
        assert (await client.status(ids["later"])).reason == "delayed"

    with WorkerProcess(disk_server.url) as worker:
        worker.ready()
        ask(disk_server.url, submit)
        worker.kill()
    disk_server.kill()
    disk_server.start()
    with WorkerProcess(disk_server.url) as worker:
        worker.ready()
        ask(disk_server.url, wait)


@pytest.mark.parametrize("is_told_twice", [True, False])
def test_a_worker_whose_time_is_up_lets_go_of_all_its_jobs_at_once(disk_server, is_told_twice):
    """Its time to drain, or at its second SIGTERM."""
    drain_s = 600 if is_told_twice else 1
    flags = ("--drain-s", str(drain_s), "--fake-step-ms", "10", "--max-num-seqs", "64")
    with WorkerProcess(disk_server.url, "fake", *flags) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            params = {"max_tokens": 4000, "ignore_eos": True}
            for number in range(64):
                await client.enqueue(f"job {number}", background=True, **params)
            [queue] = await client.queues()
            while (await queue.counts()).num_running < 64:
                await asyncio.sleep(0.01)
            worker.process.send_signal(signal.SIGTERM)
            up_s = time.monotonic() + drain_s
            await asyncio.to_thread(until, lambda: "began to drain" in worker.logged(), "draining")
            if is_told_twice:
                assert (await queue.counts()).num_running == 64
                worker.process.send_signal(signal.SIGTERM)
                up_s = time.monotonic()
            while (counts := await queue.counts()).num_handed_back < 64:
                assert time.monotonic() < up_s + LET_GO_S, counts
            print(f"let go of 64 jobs after {1000 * (time.monotonic() - up_s):.0f} ms")
            assert time.monotonic() > up_s
            assert counts.num_running == 0
            assert await asyncio.to_thread(worker.process.wait, 100) == 0

        ask(disk_server.url, asks)


@pytest.mark.slow
@pytest.mark.parametrize("step_ms, most, slack", [(10, 64, 40), (100, 20, 10)])
def test_while_redis_is_away_no_more_is_decoded_than_is_promised(disk_server, step_ms, most, slack):
    """Sixty-four tokens, or those of two seconds; counted as the log has them in the end."""
    flags = ("--fake-step-ms", str(step_ms), "--lease-ttl-ms", "60000")
    with Proxy(disk_server.port) as proxy, WorkerProcess(proxy.url, "fake", *flags) as worker:
        worker.ready()

        async def asks(client: QueueClient) -> None:
            asked = {"max_tokens": 4000, "ignore_eos": True, "background": True}
            job_id, widths = await client.enqueue("x", **asked), list[int]()
            while (before := (await client.status(job_id)).num_tokens) < 2:
                await asyncio.sleep(0.01)
            proxy.part()
            await asyncio.to_thread(until, lambda: "was paused" in worker.logged(), "the pause")
            proxy.heal()
            async for event in client.stream(job_id):
                assert isinstance(event, Delta)
                widths.append(len(event.token_ids))
                if event.end > before + most + slack:
                    break
            away = max(map(sum, pairwise(widths)))  # the commit under way, and all that waited
            print(f"{away} tokens were decoded while Redis was away")
            assert most / 4 < away <= most + slack

        ask(disk_server.url, asks)
