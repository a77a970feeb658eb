"""Chores: what nobody else is there to do."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from arq import create_pool
from arq.connections import ArqRedis
from arq.worker import func
from test_failover import command, facts, pair, sentinel, until

from penstock.compose.server import Server
from penstock.gateway.housekeeping.arq_loop import QUEUE, as_json, run_chores
from penstock.gateway.housekeeping.arq_redis import arq_settings, found_settings
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import CHORES
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import connect
from stage import HousekeepingProcess


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
        run = asyncio.create_task(
            run_chores(arq_settings(redis_url), [func(long, name="long")], [])
        )
        arq = await create_pool(arq_settings(redis_url), job_serializer=as_json)
        await arq.enqueue_job("long", _job_id="one", _queue_name=QUEUE)
        await asyncio.wait_for(begun.wait(), 60)
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        held = await arq.keys("arq:in-progress:*")
        assert await arq.zcard(QUEUE) == 1
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
    "url, host, database",
    [
        ("redis://h:1", "h:1", 1),
        ("redis://h/0", "h:6379", 1),
        ("redis://u:p%40@h:1/4", "h:1", 5),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock", 3),
    ],
)
def test_the_chores_have_the_next_database(url: str, host: str, database: int) -> None:
    settings = arq_settings(url)
    at = f"{settings.host}:{settings.port}" if settings.port else settings.host
    assert at == host
    assert settings.database == database
    assert settings.password == ("p@" if "u:p" in url else None)
    assert arq_settings("redis+cluster://h", url).database == database - 1


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


@pytest.mark.parametrize("way", ["sentinels", "hosts"])
def test_the_chores_find_the_primary(tmp_path: Path, way: str) -> None:
    async def chores_at(url: str) -> object:
        arq = await create_pool(await found_settings(url))
        await arq.enqueue_job("deliver", _job_id="x")
        return await arq.keys("*")

    with pair() as (primary, replica, _), sentinel(primary, tmp_path) as port:
        urls = {
            "sentinels": f"redis+sentinel://127.0.0.1:{port}/queue/3",
            "hosts": f"redis://127.0.0.1:{replica.port},127.0.0.1:{primary.port}/3",
        }
        keys = asyncio.run(chores_at(urls[way]))
        assert sorted(keys) == [b"arq:job:x", b"arq:queue"]
        assert command(primary, "INFO", "keyspace")["db4"]["keys"] == 2


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
