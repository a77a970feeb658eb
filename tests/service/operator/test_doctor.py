"""`penstock doctor` finds what is wrong, by name, and only that."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from api_keys import issue
from penstock.compose.doctor import DoctorSettings, Finding, of_clocks, of_redis
from penstock.compose.server import Server
from penstock.gateway.tasks.signature import SIGNATURE
from stage import HousekeepingProcess, eventually
from worker_process import WorkerProcess


def doctor(url: str, *flags: str, **environment: str) -> tuple[int, dict[str, list[str]]]:
    """Its exit status, and what it says: each verdict with the text, by what it is of."""
    command = [sys.executable, "-m", "penstock.compose.cli", "doctor", "--json"]
    run = subprocess.run(
        [*command, "--redis-url", url, *flags],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
        timeout=120,
    )
    assert not run.stderr, run.stderr
    found: dict[str, list[str]] = {}
    for each in json.loads(run.stdout):
        found.setdefault(each["of"], []).append(f"{each['verdict']}: {each['text']}")
    return run.returncode, found


@pytest.mark.slow
def test_where_all_is_well_nothing_is_bad() -> None:
    with (
        Server() as server,
        WorkerProcess(server.url).ready(),
        HousekeepingProcess(server.url),
        redis.Redis.from_url(server.url) as client,
    ):
        issue(server.url)
        eventually(lambda: client.exists(SIGNATURE) == 1, within_s=30)
        status, found = doctor(server.url, "--model", "penstock-5m")
    assert status == 0
    assert all(text.startswith("good: ") for texts in found.values() for text in texts), found
    assert found["queue"] == ["good: fake: workers that serve: 1; jobs that wait: 0"]
    parts = "redis clocks keys housekeeping queue processor gpu attention model"
    assert set(found) == set(parts.split())


@pytest.mark.slow
def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with Server(options={"appendonly": "no"}) as server:
        status, found = doctor(server.url, "--model", str(tmp_path))
        assert status == 1 and "mamba" in found["model"][0]
        assert found["redis"][0].startswith("look: ") and "appendonly" in found["redis"][0]
        assert found["housekeeping"][0].startswith("look: none runs")
        assert found["keys"][0].startswith("look: ") and found["queue"][0].startswith("look: ")
        issue(server.url)
        nowhere = {"PENSTOCK_SERVER_SECRET": "", "PENSTOCK_SERVER_SECRET_FILE": str(tmp_path / "x")}
        status, found = doctor(server.url, **nowhere)
        assert status == 1 and found["keys"][0].startswith("bad: there are API keys")
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        status, found = doctor(server.url)
        assert status == 1 and "maxmemory-policy is allkeys-lru" in found["redis"][0]
    status, found = doctor("redis://127.0.0.1:1")
    assert status == 1 and found["redis"][0].startswith("bad: ")


def test_a_primary_without_a_replica_is_bad_where_replicas_are_waited_for() -> None:
    async def redis_of(settings: DoctorSettings) -> list[Finding]:
        return [each async for each in of_redis(settings) if each.of == "redis"]

    with Server(options={"appendfsync": "always"}) as server:
        settings = DoctorSettings(redis_url=f"{server.url}?timeout_s=1", durability="replicas")
        (found,) = asyncio.run(redis_of(settings))
    assert found.verdict == "bad" and f"127.0.0.1:{server.port} has no replica" in found.text


def test_clocks_that_are_apart_are_told() -> None:
    assert of_clocks(-0.2).verdict == "good"
    assert of_clocks(-5.0).verdict == "look" and "-5.0 s" in of_clocks(-5.0).text
