"""Chores: what nobody else is there to do."""

import asyncio
import subprocess
import sys
import time

import pytest

from gateway.client import Client
from gateway.housekeeping import next_database
from schemas.connection import connect
from schemas.model import ModelCard
from schemas.registry import Registry


def test_a_job_whose_time_is_up_ends_although_no_worker_lives(redis_url: str) -> None:
    command = [sys.executable, "-m", "compose.cli", "housekeeping", "--redis-url", redis_url]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert asyncio.run(_ends(redis_url)) == "expired"
        finally:
            process.terminate()
            assert process.wait(60) == 0


async def _ends(url: str) -> str:
    async with Client.from_url(url) as client:
        await Registry(client.redis).register(ModelCard(name="idle"))
        job_id = await client.enqueue("hello", model="idle", background=True, timeout_ms=100)
        deadline = time.monotonic() + 120
        while (state := (await client.status(job_id)).state) == "ready":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        async with connect(next_database(url)) as chores:
            keys = await chores.call("KEYS", "*")
        assert isinstance(keys, list)
        assert all(key.startswith((b"arq:", b"penstock:chores")) for key in keys)
        return state


@pytest.mark.parametrize(
    "url, expected",
    [
        ("redis://h:1", "redis://h:1/1"),
        ("redis://h:1/0", "redis://h:1/1"),
        ("rediss://u:p@h:1/4?x=y", "rediss://u:p@h:1/5?x=y"),
    ],
)
def test_the_chores_have_the_next_database(url: str, expected: str) -> None:
    assert next_database(url) == expected
