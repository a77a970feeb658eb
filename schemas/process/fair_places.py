"""Fair queueing (round robin) of places that many tenants share.

A tenant that asks for a thousand places delays another's first by one piece of its own work, not by
a thousand.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that wait, each its tenant's: tenants are served in turn, a tenant's items in order."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}  # the tenant that is served next stands first

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[str]:
        """Yield the tenants that have items, the next one first."""
        return iter(self._items)

    def add(self, tenant: str, item: T) -> None:
        self._items.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: T) -> None:
        """Remove an item, if it is there."""
        items = self._items.get(tenant)
        if items and item in items:
            items.remove(item)
            if not items:
                del self._items[tenant]

    def pop(self, tenant: str | None = None) -> T:
        """Return the next item, or a tenant's; its tenant is the last to be served again."""
        tenant = next(iter(self._items)) if tenant is None else tenant
        items = self._items.pop(tenant)
        item = items.popleft()
        if items:
            self._items[tenant] = items
        return item


class FairPlaces:
    """A number of places for work. One that gets free goes to the next tenant that waits.

    With `most_a_tenant` no tenant holds more than that, so that work which hangs holds the places
    of its own tenant alone.
    """

    def __init__(self, number: int, most_a_tenant: int | None = None) -> None:
        self._free = number
        self._most_a_tenant = number if most_a_tenant is None else most_a_tenant
        self._counts: dict[str, int] = {}
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it for the block."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str) -> None:
        if self._free and self._has_room(tenant):
            return self._hold(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(tenant, turn)
            if turn.done() and not turn.cancelled():  # it was given a place a moment ago
                self._give_back(tenant)
            raise

    def _has_room(self, tenant: str) -> bool:
        return self._counts.get(tenant, 0) < self._most_a_tenant

    def _hold(self, tenant: str) -> None:
        self._free -= 1
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        while self._free:
            tenants = (candidate for candidate in self._waiting if self._has_room(candidate))
            if (next_tenant := next(tenants, None)) is None:
                return
            turn = self._waiting.pop(next_tenant)
            if not turn.done():  # else it was cancelled
                self._hold(next_tenant)
                turn.set_result(None)
