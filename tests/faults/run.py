"""One load on a system, with something going wrong in the middle of it, and all that must hold."""

import asyncio
import itertools
import random
from collections.abc import Callable

import redis

from faults.invariants import (
    Listener,
    check_ledger,
    check_leftovers,
    check_logs,
    known_jobs,
    ledger,
    wait_until_idle,
)
from faults.load import Callers
from faults.processes import System
from faults.told import Ask, Told
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.keys import Lane

LOOK_S = 0.01
_BATCHES = itertools.count()  # no two calls ask the same


def asks(num_jobs: int, max_tokens: int = 80, **others: object) -> list[Ask]:
    """Jobs of all kinds: HTTP and SDK, one to three choices, stop strings, some read late."""
    kinds: list[dict[str, object]] = [
        {},
        {"by_sdk": True},
        {"n": 3},
        {"stop": ("🚀🚀", "dams an"), "by_sdk": True},
        {"ignore_eos": False, "hop_every": 10},
        {"is_late": True, "repeats": 2},
    ]
    batch = next(_BATCHES)
    return [
        Ask(
            **{
                "prompt": f"job {batch}/{number} 🌊",
                "seed": number,
                "max_tokens": max_tokens,
                **kinds[number % len(kinds)],
                **others,
            }
        )
        for number in range(num_jobs)
    ]


def run(
    system: System,
    asked: list[Ask],
    act: Callable[[], object] | None = None,
    at_tokens: int = 100,
    model: str = "fake",
    is_empty_after: bool = True,
    may_lose: bool = False,
) -> list[Told]:
    """Every ask to its end, with `act` in a thread once readers have had `at_tokens` tokens.

    Then: each job ended once, was read whole and right, and was paid for once; the lane holds
    nothing back. Where Redis `may_lose` what it had written, that holds of the jobs that it knows.
    """
    lane = Lane(model)
    system.note_written()
    with system.telling(), Listener(system.url, lane) as listener:
        with redis.Redis.from_url(system.url) as store:
            before = ledger(store, lane)
        told = asyncio.run(_run(system, asked, act, at_tokens, model, may_lose))
        heard = listener.take(may_lose)
        with redis.Redis.from_url(system.url) as store:
            wait_until_idle(store, lane)
            job_ids = {each.job_id for each in told}
            if may_lose:
                job_ids = known_jobs(store, lane, job_ids)
            check_logs(store, lane, job_ids, None if may_lose else heard)
            check_ledger(store, lane, job_ids, before)
            if is_empty_after:
                check_leftovers(store, lane)
        system.check_ends()
    return told


async def _run(
    system: System,
    asked: list[Ask],
    act: Callable[[], object] | None,
    at_tokens: int,
    model: str,
    may_lose: bool,
) -> list[Told]:
    async with QueueClient.from_url(system.url, durability=system.durability) as sdk:
        chance = random.Random(1)
        callers = Callers(model, system.gateway_urls, sdk, chance, may_lose=may_lose)
        try:
            async with asyncio.TaskGroup() as parts:
                if act is not None:
                    parts.create_task(_act(callers, act, at_tokens))
                parts.create_task(callers.run(asked))
        finally:
            await callers.aclose()
    return callers.told


async def _act(callers: Callers, act: Callable[[], object], at_tokens: int) -> None:
    while sum(told.cursor for told in callers.told) < at_tokens:
        await asyncio.sleep(LOOK_S)
    assert not all(told.end for told in callers.told), "all was over before it went wrong"
    await asyncio.to_thread(act)
