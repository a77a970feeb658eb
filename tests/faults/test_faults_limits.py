"""One key, 200 calls at once over HTTP, ten jobs at a time, while processes die."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

import httpx
import pytest
import redis

from api_keys import issue
from faults.invariants import (
    Listener,
    check_ledger,
    check_leftovers,
    check_logs,
    told_usage,
    wait_until_idle,
)
from faults.load import Callers
from faults.processes import System, until
from faults.tenants import Tenant
from faults.told import Ask
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.account import Account
from penstock.worker.engine.fake import Stamps

MOST, NUM_FAITHFUL, NUM_GONE = 10, 150, 50
TOKENS = 20
Store = redis.Redis


@pytest.mark.slow
def test_never_more_run_than_a_key_may_and_nothing_of_it_is_held_at_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "stamps").touch()
    flags = ("--fake-step-ms", "10", "--max-num-seqs", "32", "--orphan-grace-ms", "1500")
    with System() as system:
        limits = {"max_running": MOST, "max_queued": 500, "tokens_per_minute": 1_000_000}
        key = issue(system.url, tenant="acme", limits=limits)
        tenant = Tenant("acme", key, Account(name=f"acme/{key.split('_')[1]}"))
        for _ in range(2):
            system.worker(*flags, "--fake-stamps", str(tmp_path / "stamps"))
            system.gateway("--ping-s", "1")
        system.ready()
        with (
            system.telling(),
            Listener(system.url, system.lane) as listener,
            redis.Redis.from_url(system.url, decode_responses=True) as text,
            redis.Redis.from_url(system.url) as store,
        ):
            lapse_ms, held = asyncio.run(flood(system, tenant, text))
            wait_until_idle(store, system.lane)
            jobs = jobs_of(system, text)
            assert NUM_FAITHFUL <= len(jobs) <= NUM_FAITHFUL + NUM_GONE
            assert held and all(int(jobs[one]["ended_ms"]) - lapse_ms < 10_000 for one in held)
            ran = [
                (int(job["started_ms"]), int(job["ended_ms"]))
                for job in jobs.values()
                if "started_ms" in job
            ]
            assert most_at_once(ran) == MOST
            assert most_at_once(made(tmp_path / "stamps")) <= MOST
            check_logs(store, system.lane, jobs, listener.take())
            check_ledger(store, system.lane, jobs, Counter(), tenant.account.name)
            check_leftovers(store, system.lane)
            check_minute(system, store, tenant.account.name, jobs)


async def flood(system: System, tenant: Tenant, store: redis.Redis) -> tuple[int, list[str]]:
    """All calls at once. A worker and a gateway die in the middle, and some callers with it.

    When the dead worker's lease lapsed, by Redis's clock, and the jobs that it had.
    """
    asks = [
        Ask(f"call {number:03}", seed=number, max_tokens=TOKENS) for number in range(NUM_FAITHFUL)
    ]
    async with QueueClient.from_url(system.url) as sdk:
        callers = Callers(system.name, system.gateway_urls, sdk, random.Random(1), [tenant])
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(callers.run(asks))
                for number in range(NUM_FAITHFUL, NUM_FAITHFUL + NUM_GONE):
                    url = system.gateways[number % 2].url
                    parts.create_task(call_once(f"{url}/v1/completions", tenant, number))
                while not any(told.cursor for told in callers.told):
                    await asyncio.sleep(0.01)
                return await asyncio.to_thread(kill_some, system, store)
        finally:
            await callers.aclose()


async def call_once(url: str, tenant: Tenant, number: int) -> None:
    """A foreground call that nobody repeats."""
    body = {"model": "fake", "prompt": f"once {number:03}", "max_tokens": TOKENS}
    headers = {"authorization": f"Bearer {tenant.key}"}
    async with httpx.AsyncClient(timeout=100) as http:
        try:
            reply = await http.post(url, json=body | {"ignore_eos": True}, headers=headers)
        except httpx.TransportError:
            return
    assert reply.status_code == 200, reply.text


def kill_some(system: System, store: Store) -> tuple[int, list[str]]:
    """A gateway that has callers, and a worker that has jobs."""
    worker, held = system.workers[0], dict[str, list[str]]()

    def is_stopped_at_work() -> bool:
        worker.send(signal.SIGSTOP)
        held.clear()
        jobs = jobs_of(system, store)
        for name in store.zrange(f"{system.lane.prefix}workers", 0, -1):
            if f"-{worker.process.pid}-" in name:
                held[name] = [one for one, job in jobs.items() if is_with(job, name)]
        if any(held.values()):
            return True
        worker.send(signal.SIGCONT)
        return False

    until(is_stopped_at_work, "it to have jobs")
    # Its process on a busy machine may have begun anew, and the name before it holds nothing.
    [(name, job_ids)] = [each for each in held.items() if each[1]]
    lapse_ms = int(store.zscore(f"{system.lane.prefix}workers", name))
    worker.kill()
    system.gateways[0].kill()
    return lapse_ms, job_ids


def is_with(job: Mapping[str, str], worker: str) -> bool:
    return job.get("owner") == worker and job["state"] in ("admitting", "decoding")


def jobs_of(system: System, store: Store) -> dict[str, dict[str, str]]:
    """What Redis knows of each job of the lane."""
    head = system.lane.job("")
    keys = [key for key in store.scan_iter(f"{head}*", count=1000) if ":" not in key[len(head) :]]
    return {key[len(head) :]: store.hgetall(key) for key in keys}


def made(stamps: Path) -> list[tuple[float, float]]:
    """When the engines made the first and the last token of each faithful caller's job."""
    written, spans = Stamps(stamps), []
    for number in range(NUM_FAITHFUL):
        at_s = [each for each in written.row(number) if each]
        spans.append((min(at_s), max(at_s)))
    return spans


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Whoever ends in the moment in which another begins has made room for it."""
    steps = [step for began, ended in spans for step in ((began, 1), (ended, -1))]
    return max(accumulate(change for _, change in sorted(steps)))


def check_minute(
    system: System, store: Store, account: str, jobs: Mapping[str, Mapping[str, str]]
) -> None:
    """What jobs drew from the minute of their key and did not use is free again."""
    key = f"{system.lane.prefix}account:{account}"
    minute, tokens = map(int, store.hmget(key, "minute", "tokens"))
    used = sum(told_usage(store, system.lane, job_id).total() for job_id in jobs)
    is_the_first = minute == min(int(job["created_ms"]) for job in jobs.values())
    least = used if is_the_first else 0
    assert least <= tokens <= used, f"the minute holds {tokens} tokens, {used} were used"
