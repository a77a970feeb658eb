"""What chaos sees and does, by itself."""

import asyncio
import os
import signal
import time

import pytest
import redis

from faults.chaos import keep_alive
from faults.processes import System
from worker_process import until


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_by_itself_is_seen_and_not_started_again(number: int) -> None:
    with System() as system:
        house = system.housekeeping().ready()
        os.kill(house.process.pid, number)
        until(lambda: not house.is_alive, "its end")
        with pytest.raises(AssertionError, match="Housekeeping ended by itself, status"):
            asyncio.run(keep_alive(system))
        with pytest.raises(AssertionError, match="Housekeeping ended by itself"):
            system.replace(house)
        assert system.houses == [house]


@pytest.mark.slow
def test_what_a_fault_killed_or_stopped_is_started_again() -> None:
    async def while_kept(system: System) -> None:
        keeper = asyncio.create_task(keep_alive(system))
        for end in (lambda: system.houses[0].kill(), lambda: system.houses[0].terminate()):
            old = system.houses[0]
            end()
            async with asyncio.timeout(60):
                while not system.houses or system.houses[0] is old:
                    assert not keeper.done()
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(system.ready)
        keeper.cancel()

    with System() as system:
        system.housekeeping().ready()
        asyncio.run(while_kept(system))
        system.check_ends()


def test_the_clock_of_redis_jumps_past_a_time_to_live() -> None:
    with System() as system, redis.Redis.from_url(system.url) as store:
        store.set("kept", 1)
        store.set("kept for a time", 1, ex=3600)
        system.clock.step(7200)
        until(lambda: store.time()[0] > time.time() + 7000, "the server to read its clock again")
        until(lambda: store.keys() == [b"kept"], "the other key to be gone")
        system.restart_server()
        until(lambda: store.time()[0] > time.time() + 7000, "the same after a restart")
        assert store.keys() == [b"kept"]
