"""How long readers wait for Redis to come back."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.schemas.errors import QueueUnreachable


class Patience:
    """A bound on waiting, which runs only while Redis is away.

    Time spent on anything else, as behind other readers, is not counted: Redis is not to blame.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._bounds: set[asyncio.Timeout] = set()
        self._away_since_s: float | None = None  # by the loop's clock

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """End the block where Redis is away for too long meanwhile. Raises QueueUnreachable."""
        try:
            async with asyncio.timeout(None) as bound:
                self._bounds.add(bound)
                try:
                    if self._away_since_s is not None:
                        bound.reschedule(asyncio.get_running_loop().time() + self._limit_s)
                    yield
                finally:
                    self._bounds.discard(bound)
        except TimeoutError:
            raise QueueUnreachable(f"Redis was away for {self._limit_s:g} s") from None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note it where Redis fails in the block."""
        began_s = asyncio.get_running_loop().time()
        try:
            yield
        except QueueUnreachable:
            if self._away_since_s is None:
                self._away_since_s = began_s
                self._set(began_s + self._limit_s)
            raise

    def succeed(self) -> None:
        """Note that Redis gave what was asked for."""
        if self._away_since_s is not None:
            self._away_since_s = None
            self._set(None)

    def _set(self, until_s: float | None) -> None:
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(until_s)
