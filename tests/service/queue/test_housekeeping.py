"""Chores: what nobody else is there to do."""

import asyncio
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from arq.connections import ArqRedis
from arq.worker import func
from test_failover import (
    CLIENT_PEM,
    SERVER_PEM,
    command,
    facts,
    pair,
    sentinel,
    tls_relay,
    until,
)

from penstock.compose.server import Server
from penstock.gateway.housekeeping.arq_loop import QUEUE, run_chores
from penstock.gateway.housekeeping.arq_redis import chores_place, connect_arq
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import CHORES
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.url import parse
from stage import HousekeepingProcess

CHORE = [b"arq:job:x", QUEUE.encode()]  # the keys of one


def test_a_job_whose_time_is_up_ends_although_no_worker_lives(redis_url: str) -> None:
    command = [
        sys.executable,
        "-m",
        "penstock.compose.cli",
        "housekeeping",
        "--redis-url",
        redis_url,
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert asyncio.run(_ends(redis_url)) == "expired"
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_a_chore_cut_short_by_sigterm_is_no_failure(redis_url: str) -> None:
    """It is done again at once by whoever comes next: arq holds it no longer."""

    async def long(ctx: dict[str, ArqRedis]) -> None:
        begun.set()
        await asyncio.sleep(60)

    async def main() -> list[bytes]:
        arq, kept = await connect_arq(redis_url), await connect_arq(redis_url)
        await arq.enqueue_job("long", _job_id="one")
        num_clients = len(await arq.client_list())
        run = asyncio.create_task(run_chores(kept, [func(long, name="long")], []))
        await asyncio.wait_for(begun.wait(), 60)
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        held = await arq.keys("arq:in-progress:*")
        assert await arq.zcard(QUEUE) == 1
        async with asyncio.timeout(20):  # within which it closes its own
            while len(await arq.client_list()) > num_clients:
                await asyncio.sleep(0.01)
        await arq.aclose()
        return list(held)

    begun = asyncio.Event()
    assert asyncio.run(main()) == []


async def _ends(url: str) -> str:
    async with QueueClient.from_url(url) as client:
        await Registry(client.redis).register(ModelCard(name="idle"))
        job_id = await client.enqueue("hello", model="idle", background=True, timeout_ms=100)
        deadline = time.monotonic() + 120
        while (state := (await client.status(job_id)).state) == "ready":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        async with connect(url.removesuffix("/0") + "/1") as chores:
            keys = await chores.call("KEYS", "*")
        assert isinstance(keys, list)
        assert all(key.startswith((b"arq:", b"penstock:chores")) for key in keys)
        return state


@pytest.mark.parametrize(
    "url, database",
    [
        ("redis://h:1", 1),
        ("redis://u:p%40@h:1/4", 5),
        ("unix:///run/redis.sock?db=2", 3),
        ("redis://a,b", 1),
        ("redis+sentinel://s,t:9/main/2", 3),
    ],
)
def test_the_chores_have_the_next_database(url: str, database: int) -> None:
    jobs, chores = parse(url), chores_place(url)
    assert chores.database == database
    assert replace(chores, database=jobs.database) == jobs
    assert chores_place("redis+cluster://h", url) == jobs


@pytest.mark.parametrize(
    "words, says",
    [
        (["--redis-url", "redis+cluster://h"], "a cluster has no database for chores"),
        (["--chores-redis-url", "redis+cluster://h"], "name servers, or sentinels"),
        (["--chores-redis-url", "http://h"], "scheme: 'http'"),
        (["--chores-redis-url", "redis://h:port"], "port: 'port'"),
    ],
)
def test_where_arq_cannot_go_is_said_by_the_flag(words: list[str], says: str) -> None:
    command = [sys.executable, "-m", "penstock.gateway.housekeeping.main", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 2
    assert "--chores-redis-url: " in run.stderr and says in run.stderr
    assert "Traceback" not in run.stderr


async def put_chore(url: str) -> None:
    arq = await connect_arq(url)
    await arq.enqueue_job("deliver", _job_id="x")
    await arq.aclose()


def keys_of(server: Server, database: int) -> list[bytes]:
    with redis.Redis(port=server.port, db=database) as found:
        return sorted(found.keys())


def test_the_chores_are_at_the_primary_that_is_found(tmp_path: Path) -> None:
    """By a sentinel with a password, and by several hosts of which the first is a replica."""
    with pair() as (primary, replica, _), sentinel(primary, tmp_path) as port:
        with redis.Redis(port=port) as found:
            found.execute_command("ACL", "SETUSER", "default", "resetpass", ">sesame")
        for database, url in (
            (4, f"redis+sentinel://127.0.0.1:{port}/queue/3?sentinel_password=sesame"),
            (6, f"redis://127.0.0.1:{replica.port},127.0.0.1:{primary.port}/5"),
        ):
            asyncio.run(put_chore(url))
            assert keys_of(primary, database) == CHORE


def test_the_chores_go_over_tls_and_by_a_socket(tmp_path: Path) -> None:
    async def over_tls() -> None:
        async with tls_relay(server) as port:
            await put_chore(f"rediss://127.0.0.1:{port}/2?ca={SERVER_PEM}&cert={CLIENT_PEM}")

    with Server(options={"unixsocket": str(tmp_path / "socket")}) as server:
        asyncio.run(over_tls())
        assert keys_of(server, 3) == CHORE
        asyncio.run(put_chore(f"unix://{tmp_path}/socket?db=4"))
        assert keys_of(server, 5) == CHORE


@pytest.mark.slow
def test_the_chores_go_on_past_a_sentinel_that_says_nothing_when_the_primary_dies(
    tmp_path: Path,
) -> None:
    """It takes connections and never answers: a machine that swaps, or a way that is cut."""
    signature = f"{CHORES}signature"
    with (
        pair() as (primary, replica, _),
        sentinel(primary, tmp_path) as port,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port}"
        url = f"redis+sentinel://{hosts}/queue?timeout_s=1"

        def has_signed(server: Server) -> bool:
            with redis.Redis.from_url(server.url) as client:
                return bool(client.exists(signature))

        with HousekeepingProcess(url):
            until(lambda: has_signed(primary), "the chores to begin")
            primary.kill()
            until(lambda: facts(replica)["role"] == "master", "the replica's turn")
            command(replica, "DEL", signature)
            until(lambda: has_signed(replica), "the chores to go on")
