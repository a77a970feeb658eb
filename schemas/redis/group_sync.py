"""Waits until writes are on the disk. One WAITAOF at a time serves all callers that wait.

    mark = await sync.begin(prefix)   before anything that must be on the disk is written or read
    ...
    await sync.wait(mark)             raises where the server was lost in between

The link of a mark is opened before the write. So it is noticed when a server was restarted and
came back without the tail of its file, whatever it answers now.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.redis.link import Link, LinkLost, ServerRefused, pack
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import Address

WAIT_MS = 4000  # below a link's time-out
TOUCH_TTL_S = 60
UNKNOWN = "unknown command"


@dataclass(slots=True, eq=False)
class Mark:
    """A link to one server, and the rounds of waiting on it."""

    link: Link
    prefix: str
    running: asyncio.Task[None] | None = None
    next: asyncio.Task[None] | None = None


class Sync(Protocol):
    async def begin(self, prefix: str) -> Mark | None:
        """Return a mark for `wait`, before the write or read. Raises QueueUnreachable."""

    async def wait(self, mark: Mark | None) -> None:
        """Wait until what was written or read since `begin` is on the disk.

        Raises QueueUnreachable where it may not be there, or not any more.
        """

    def close(self) -> None:
        """Close the links. Nobody may wait any more."""


class NoSync:
    """A Sync that does nothing, for `durability=server`: the server's own writing is enough."""

    async def begin(self, prefix: str) -> None:
        return None

    async def wait(self, mark: Mark | None) -> None:
        return None

    def close(self) -> None:
        return None


class GroupSync:
    """The Sync for `durability=fsync`. A server without WAITAOF must have appendfsync always."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._marks: dict[Address, Mark] = {}
        self._opening: dict[Address, asyncio.Task[Mark]] = {}

    async def begin(self, prefix: str) -> Mark:
        try:
            address = await self._redis.find(prefix)
            mark = self._marks.get(address)
            if mark is None or mark.link.lost.done():
                if address not in self._opening:
                    self._opening[address] = asyncio.create_task(self._open(address, prefix))
                mark = await asyncio.shield(self._opening[address])
        except (LinkLost, ServerRefused) as error:
            self._redis.doubt()
            raise QueueUnreachable(f"Redis could not be reached: {error}") from error
        return mark

    async def wait(self, mark: Mark | None) -> None:
        assert mark is not None
        if mark.next is None:  # a running round may have begun before our write
            mark.next = asyncio.create_task(self._round(mark))
        try:
            await asyncio.shield(mark.next)
        except (LinkLost, ServerRefused) as error:
            mark.link.close()
            self._redis.doubt()
            raise QueueUnreachable(f"it is not known to be on the disk: {error}") from error

    def close(self) -> None:
        for mark in self._marks.values():
            mark.link.close()

    async def _open(self, address: Address, prefix: str) -> Mark:
        try:
            mark = self._marks[address] = Mark(await self._redis.open(address), prefix)
            return mark
        finally:
            del self._opening[address]

    async def _round(self, mark: Mark) -> None:
        if mark.running is not None:
            await asyncio.wait([mark.running])
        mark.running, mark.next = mark.next, None
        # WAITAOF waits for what its own connection wrote, and so for all that was written before.
        touched = mark.link.send(pack("SET", f"{mark.prefix}synced", 1, "EX", TOUCH_TTL_S))
        waited = mark.link.send(pack("WAITAOF", 1, 0, WAIT_MS))
        for reply in await asyncio.gather(touched, waited):
            match reply:
                case ServerRefused() if UNKNOWN in str(reply):
                    return  # appendfsync always, as was checked at the start
                case ServerRefused():
                    raise reply
                case [0, *_]:
                    raise LinkLost(f"the disk did not take it in {WAIT_MS} ms")
