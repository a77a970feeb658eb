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
    ledger,
    wait_until_idle,
)
from faults.load import Ask, Callers, Told
from faults.processes import System
from gateway.client import Client
from schemas.keys import Lane

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
) -> list[Told]:
    """Every ask to its end, with `act` in a thread once readers have had `at_tokens` tokens.

    Then: each job ended once, was read whole and right, and was paid for once; the lane holds
    nothing back.
    """
    lane = Lane(model)
    with system.telling(), Listener(system.url, lane) as listener:
        with redis.Redis.from_url(system.url) as store:
            before = ledger(store, lane)
        told = asyncio.run(_run(system, asked, act, at_tokens, model))
        with redis.Redis.from_url(system.url) as store:
            wait_until_idle(store, lane)
            job_ids = [each.job_id for each in told]
            check_logs(store, lane, job_ids, listener.take())
            check_ledger(store, lane, job_ids, before)
            if is_empty_after:
                check_leftovers(store, lane)
    return told


async def _run(
    system: System,
    asked: list[Ask],
    act: Callable[[], object] | None,
    at_tokens: int,
    model: str,
) -> list[Told]:
    async with Client.from_url(system.url, durability=system.durability) as sdk:
        callers = Callers(model, system.gateway_urls, sdk, random.Random(1))
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
