"""Turns of the event loop itself, for what many readers make at once: tenant by tenant.

Such work is not large, but there is a lot of it. Done as it comes it would run in one go, and
whatever else is ready would wait for all of it.
"""

import asyncio

from penstock.schemas.process.fair_places import Turns

BURST_S = 0.002  # length of a burst of work; after it the loop does what else is ready
REST_S = 0.004  # after a burst, if more of it waits


class LoopTurns:
    """Lets those that wait go on one by one, in bursts with a rest after each.

    With the usual rest, others have two thirds of the loop. Without one the order alone is fair.
    """

    def __init__(self, rest_s: float = REST_S) -> None:
        self._rest_s = rest_s
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._is_busy = False  # a turn was given a moment ago, or a rest follows a burst
        self._until_s = 0.0  # when the burst ends

    async def turn(self, tenant: str) -> None:
        """Return when it is the tenant's turn: the caller then works until it waits for others."""
        loop = asyncio.get_running_loop()
        if not self._is_busy:
            self._is_busy = True
            self._until_s = loop.time() + BURST_S
            loop.call_soon(self._go_on)
            return
        turn = loop.create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(tenant, turn)
            raise

    def _go_on(self) -> None:
        """Give the next turn, or rest; the loop calls this once in each of its rounds."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._is_busy = False
        elif loop.time() < self._until_s:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
            loop.call_soon(self._go_on)
        else:
            loop.call_later(self._rest_s, self._begin)

    def _begin(self) -> None:
        self._until_s = asyncio.get_running_loop().time() + BURST_S
        self._go_on()
