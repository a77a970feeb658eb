"""Hosts whose clocks are a day wrong: what expires does so by Redis's clock, and nothing else."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import redis
from test_faults_workers import SLOW

from api_keys import bearer, issue
from faults.processes import System, skewed
from faults.run import asks, run
from penstock.gateway.files.files import UNKNOWN_KEPT_S
from penstock.schemas.keys import CHORES
from receiver import Receiver
from stage import eventually

WRONG = pytest.mark.parametrize("shift_s", [-90_000, 90_000])


@pytest.fixture
def system() -> Iterator[System]:
    with System() as system:
        system.gateway("--ping-s", "1")
        yield system


@pytest.mark.slow
@WRONG
def test_the_clocks_of_workers_do_not_matter(system: System, shift_s: int) -> None:
    """A worker a day before or after: it keeps its lease, loses none, and deadlines hold."""
    wrong = system.worker(*SLOW, **skewed(shift_s)).ready()
    system.worker(*SLOW)
    check_deadlines(system.ready())
    assert "lost its lease" not in wrong.logged()


def check_deadlines(system: System) -> None:
    in_time = asks(6, max_tokens=60, timeout_ms=600_000)
    too_late = asks(4, max_tokens=500, timeout_ms=500, is_late=False)
    too_late = [replace(ask, prompt=f"late {ask.prompt}") for ask in too_late]
    told = run(system, in_time + too_late)
    assert {each.end.state for each in told[:6] if each.end} == {"succeeded"}
    assert "expired" in {each.end.state for each in told[6:] if each.end}


@pytest.mark.slow
@WRONG
def test_the_clocks_of_gateways_and_housekeeping_do_not_matter(
    system: System, tmp_path: Path, shift_s: int
) -> None:
    """Jobs, keys and shares end when they should, webhooks are dated right, files are kept."""
    receiver, fresh, old = Receiver(), tmp_path / "upload", tmp_path / "left over"
    fresh.touch()
    old.touch()
    os.utime(old, times=(0, time.time() - 2 * UNKNOWN_KEPT_S))
    flags = ("--webhook-private", receiver.url)
    wrong = system.gateway("--ping-s", "1", *flags, **skewed(shift_s))
    system.housekeeping("--files-folder", str(tmp_path), *flags, **skewed(shift_s))
    system.worker(*SLOW)
    check_deadlines(system.ready())
    assert wrong.url is not None
    now_s = int(time.time())
    body = {"model": "fake", "prompt": "x", "webhook": f"{receiver.url}/hook"}
    valid, ended = (
        bearer(issue(system.url, tenant="acme", expires_s=now_s + left)) for left in (3600, -3600)
    )
    with httpx.Client(base_url=wrong.url, timeout=60) as http:
        eventually(lambda: http.get("/v1/models", headers=ended).status_code == 401, 30)
        submitted = http.post("/v1/jobs", json=body, headers=valid)
        assert submitted.status_code == 202, submitted.text
        job = f"/v1/jobs/{submitted.json()['id']}"
        kept, brief = (
            http.post(f"{job}/share", json={"expires_s": left}, headers=valid).json()["token"]
            for left in (3600, 1)
        )
        eventually(lambda: http.get(job, headers=bearer(brief)).status_code == 401, 30)
        for url in system.gateway_urls():
            assert httpx.get(url + job, headers=bearer(kept), timeout=60).status_code == 200
    eventually(lambda: not old.exists() and bool(receiver.posts["/hook"]))
    assert fresh.exists()
    [post] = receiver.posts["/hook"]
    assert abs(int(post.headers["webhook-timestamp"]) - now_s) < 200
    receiver.close()


HAND_OVER = """
import asyncio, sys
from penstock.gateway.housekeeping.arq_redis import connect_arq
from penstock.gateway.housekeeping.chores import _hand_over
from penstock.gateway.tasks.due import Due
from penstock.schemas.redis.connection import connect

async def main(url):
    async with connect(url) as link:
        due = Due(link, "webhooks")
        await due.poke("none:443", "gone")
        await _hand_over(await connect_arq(url), due, "deliver")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_chore_of_a_lost_host_is_done_by_one_whose_clock_is_behind(system: System) -> None:
    words = [sys.executable, "-c", HAND_OVER, system.url]
    subprocess.run(words, env=os.environ | skewed(90_000), check=True, timeout=100)
    with redis.Redis.from_url(system.url) as store:
        assert store.zcard(f"{CHORES}due:webhooks") == 1
        system.housekeeping().ready()
        eventually(lambda: store.zcard(f"{CHORES}due:webhooks") == 0, 60)
