"""Waiting until what was written is on the disk: one WAITAOF at a time serves all who wait.

    mark = await sync.begin(prefix)   before what is to be kept is written or read
    ...
    await sync.wait(mark)             raises where the server was lost in between

The link of a mark is opened before, so a server that came back without the tail of its file is
noticed, whatever it says now.
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
        """Before. Raises QueueUnreachable."""

    async def wait(self, mark: Mark | None) -> None:
        """After. Raises QueueUnreachable: it may not be on the disk, or not be there any more."""

    def close(self) -> None:
        """Nobody waits any more."""


class NoSync:
    """What the server does by itself is enough."""

    async def begin(self, prefix: str) -> None:
        return None

    async def wait(self, mark: Mark | None) -> None:
        return None

    def close(self) -> None:
        return None


class GroupSync:
    """For `durability=fsync`. A server without WAITAOF must have appendfsync always."""

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
        if mark.next is None:  # a round that runs may have begun before what we wrote
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
