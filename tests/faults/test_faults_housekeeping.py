"""Housekeeping outlives what its Redis goes through, and its chores go on by themselves."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis
from arq import cron
from arq.connections import ArqRedis
from arq.worker import func

from faults.processes import System
from penstock.compose.server import free_port
from penstock.gateway.housekeeping.arq_loop import keep_running, run_chores
from penstock.gateway.housekeeping.arq_redis import connect_arq
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.webhooks.webhooks import Occurrence, Webhooks
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.link import LinkLost, ServerRefused
from receiver import Receiver
from stage import eventually

ENDED = {"completed", "failed", "expired", "cancelled"}


def restart(system: System, times: int = 6) -> None:
    for _ in range(times):
        system.restart_server()
        time.sleep(0.2)


def cut(system: System, times: int = 20) -> None:
    with redis.Redis.from_url(system.url) as client:
        for _ in range(times):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            time.sleep(0.05)


def fill(system: System) -> None:
    with redis.Redis.from_url(system.url) as client:
        client.config_set("maxmemory", 1)
        time.sleep(1.5)
        client.config_set("maxmemory", 0)


def make_read_only(system: System) -> None:
    with redis.Redis.from_url(system.url) as client:
        client.replicaof("127.0.0.1", free_port())
        time.sleep(1.5)
        client.replicaof("no", "one")


OUTAGES = [restart, cut, fill, make_read_only]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.slow
@pytest.mark.parametrize("outage", OUTAGES)
def test_two_housekeepings_outlive_an_outage(
    receiver: Receiver, outage: Callable[[System], None]
) -> None:
    with System() as system, system.telling():
        for _ in range(2):
            system.housekeeping("--webhook-private", receiver.url)
        system.ready()
        outage(system)
        assert asyncio.run(end_of_what_expires(system.url, f"{receiver.url}/hook")) == "expired"
        eventually(lambda: bool(receiver.posts["/hook"]), 60)
        for house in system.houses:
            assert house.is_alive
            assert "Traceback" not in house.logged()
        assert any("chores begin anew" in house.logged() for house in system.houses)  # it was felt


async def end_of_what_expires(url: str, hook: str) -> str:
    """Make work for housekeeping: a job that it has to end, and a webhook to send."""
    async with QueueClient.from_url(url) as client:
        await Registry(client.redis).register(ModelCard(name="idle"))
        job = await client.enqueue("x", model="idle", background=True, timeout_ms=1)
        await Webhooks(client.redis).tell(
            Occurrence(client.tenant, "job.expired", job, 1, {}), hook
        )
        while (state := (await client.status(job)).state) == "ready":
            await asyncio.sleep(0.1)
        return state


@pytest.mark.slow
def test_batches_and_webhooks_go_on_through_all_outages(receiver: Receiver, tmp_path: Path) -> None:
    flags = ("--files-folder", str(tmp_path), "--webhook-private", receiver.url)
    with System() as system, system.telling():
        gateway = system.gateway("--ping-s", "1", *flags)
        system.worker("--fake-step-ms", "10")
        for _ in range(2):
            system.housekeeping("--batch-window", "2", "--webhook-retry-s", "0.2", *flags)
        system.ready()
        assert gateway.url is not None
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            batches = [start_batch(http, 20) for _ in range(3)]
            for outage in OUTAGES:
                for _ in range(5):
                    submit_with_webhook(http, receiver)
                outage(system)
            eventually(lambda: all(state_of(http, batch) in ENDED for batch in batches))
            eventually(lambda: len({post.id for post in receiver.posts["/hook"]}) >= 20)
            for batch in batches:
                counts = http.get(f"/v1/batches/{batch}").json()["request_counts"]
                assert counts == {"total": 20, "completed": 20, "failed": 0}
        assert all(house.is_alive for house in system.houses)


def start_batch(http: httpx.Client, num_lines: int) -> str:
    line = '{"custom_id":"%d","method":"POST","url":"/v1/completions","body":%s}\n'
    body = '{"model":"fake","prompt":"x","max_tokens":5,"ignore_eos":true}'
    content = "".join(line % (number, body) for number in range(num_lines))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in", content)})
    assert file.status_code == 200, file.text
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = http.post("/v1/batches", json=asked)
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


def submit_with_webhook(http: httpx.Client, receiver: Receiver) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 1, "webhook": f"{receiver.url}/hook"}
    submitted = http.post("/v1/jobs", json=body)
    assert submitted.status_code == 202, submitted.text


def state_of(http: httpx.Client, batch: str) -> str:
    return str(http.get(f"/v1/batches/{batch}").json()["status"])


@pytest.mark.slow
def test_signals_act_while_redis_is_away_as_they_do_at_the_first() -> None:
    with System() as system, system.telling():
        house = system.housekeeping().ready()
        system.server.kill()
        house.wait_for("chores begin anew in 1.0 s")
        os.kill(house.process.pid, signal.SIGHUP)
        house.wait_for("settings were read again")
        house.terminate()
        assert house.process.wait(10) == 0
        assert "Traceback" not in house.logged()


def test_hundreds_of_beginnings_leave_nothing_open(redis_url: str) -> None:
    open_files = []

    async def chore(ctx: dict[str, ArqRedis]) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        open_files.append(descriptors())
        clock = [cron(chore, second=set(range(60)), run_at_startup=True)]
        await run_chores(await connect_arq(redis_url), [], clock)

    async def main() -> None:
        this = asyncio.create_task(keep_running(run, 0.0))
        async with connect(redis_url) as link:
            while len(open_files) < 300:
                await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await asyncio.sleep(0.001)
        this.cancel()
        await asyncio.wait([this])
        assert this.cancelled() and len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert max(open_files[100:]) <= max(open_files[:100])


@pytest.mark.slow
def test_one_signal_ends_it_also_while_its_connections_are_cut(redis_url: str) -> None:
    """redis-py on Python 3.11 loses a cancellation that comes as something has just been sent."""

    async def chore(ctx: dict[str, ArqRedis]) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        begun.append(1)
        await run_chores(await connect_arq(redis_url), [func(chore)], [])

    async def main() -> None:
        async with connect(redis_url) as link:
            for _ in range(10):
                begun.clear()
                this = asyncio.create_task(keep_running(run, 0.0))
                while len(begun) < 8:
                    await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    await asyncio.sleep(0.001)
                this.cancel()
                await asyncio.wait([this], timeout=20)
                assert this.cancelled()

    begun = list[int]()
    asyncio.run(main())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


ERRORS = [
    ConnectionError("cut"), TimeoutError(), redis.WatchError(), LinkLost("no primary"),
    ServerRefused("LOADING"), KeyError("ours"),
]  # fmt: skip


def test_what_is_no_outage_is_not_tried_again() -> None:
    """A fault of our own ends the process, with its traceback."""
    runs = []

    async def run() -> None:
        runs.append(len(runs))
        raise ERRORS[runs[-1]]

    async def run_for_a_while() -> None:
        async with asyncio.timeout(5):
            await keep_running(run, 0.001)

    with pytest.raises(KeyError, match="ours"):
        asyncio.run(run_for_a_while())
    assert len(runs) == len(ERRORS)
