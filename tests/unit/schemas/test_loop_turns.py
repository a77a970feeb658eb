"""Turns of the event loop: much work of one tenant goes on beside what else there is."""

import asyncio

import pytest

from penstock.gateway.follow.patience import Patience
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.process.loop_turns import LoopTurns


def test_one_goes_on_in_a_round_of_the_loop_and_tenants_in_turn() -> None:
    async def main() -> None:
        turns, went, rounds = LoopTurns(rest_s=0.0), list[str](), list[int]()

        async def work(tenant: str) -> None:
            await turns.turn(tenant)
            went.append(tenant)

        tasks = [asyncio.create_task(work(tenant)) for tenant in ["many"] * 20 + ["one"]]
        while len(went) < len(tasks):
            before = len(went)
            await asyncio.sleep(0)
            rounds.append(len(went) - before)
        assert max(rounds) <= 1
        assert went.index("one") <= 2

    asyncio.run(main())


def test_who_leaves_while_it_waits_holds_up_nobody() -> None:
    async def main() -> None:
        turns = LoopTurns()
        await turns.turn("a")
        gone, last = (asyncio.create_task(turns.turn(each)) for each in "ab")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(last, 10)
        await asyncio.sleep(0.02)
        await asyncio.wait_for(turns.turn("a"), 10)

    asyncio.run(main())


def test_patience_runs_only_while_redis_is_away() -> None:
    async def main() -> None:
        patience = Patience(0.05)
        async with patience.bounded():
            await asyncio.sleep(0.2)  # as long as others are served
        with pytest.raises(QueueUnreachable, match=r"Redis was away for 0\.05 s"):
            async with patience.bounded():
                _fail(patience)
                await asyncio.sleep(10)
        with pytest.raises(QueueUnreachable, match=r"0\.05 s"):
            async with patience.bounded():  # it is away still, for one who comes later too
                await asyncio.sleep(10)
        async with patience.bounded():
            patience.succeed()
            await asyncio.sleep(0.2)

    asyncio.run(main())


def _fail(patience: Patience) -> None:
    with pytest.raises(QueueUnreachable), patience.noted():
        raise QueueUnreachable("no answer")
