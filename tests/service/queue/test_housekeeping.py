"""Chores: what nobody else is there to do."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from arq import create_pool
from arq.connections import ArqRedis
from arq.worker import func
from test_failover import command, pair, sentinel

from penstock.gateway.housekeeping.arq_loop import QUEUE, as_json, run_chores
from penstock.gateway.housekeeping.arq_redis import arq_settings
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import connect


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
        ("redis+sentinel://s,t:9/main/2", "s:26379,t:9", 3),
    ],
)
def test_the_chores_have_the_next_database(url: str, host: str, database: int) -> None:
    settings = arq_settings(url)
    given = [(settings.host, settings.port)] if isinstance(settings.host, str) else settings.host
    assert ",".join(f"{name}:{port}" if port else name for name, port in given) == host
    assert settings.database == database
    assert settings.password == ("p@" if "u:p" in url else None)
    assert arq_settings("redis+cluster://h", url).database == database - 1


@pytest.mark.parametrize(
    "words, says",
    [
        (["--redis-url", "redis+cluster://h"], "a cluster has no database for chores"),
        (["--chores-redis-url", "redis+cluster://h"], "name a single server, or sentinels"),
        (["--chores-redis-url", "redis://a,b"], "chores take one server"),
        (["--chores-redis-url", "redis+sentinel://s/m?sentinel_password=x"], "without a login"),
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


def test_the_chores_follow_sentinels_to_the_primary(tmp_path: Path) -> None:
    async def chores_at(url: str) -> object:
        arq = await create_pool(arq_settings(url))
        await arq.enqueue_job("deliver", _job_id="x")
        return await arq.keys("*")

    with pair() as (primary, *_), sentinel(primary, tmp_path) as port:
        keys = asyncio.run(chores_at(f"redis+sentinel://127.0.0.1:{port}/queue/3"))
        assert sorted(keys) == [b"arq:job:x", b"arq:queue"]
        assert command(primary, "INFO", "keyspace")["db4"]["keys"] == 2
