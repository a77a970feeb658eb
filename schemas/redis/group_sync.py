"""Waits until writes are on the disk, and on a replica's. One round at a time serves all.

    mark = await sync.begin(prefix)   before anything that must be on the disk is written or read
    await sync.prove(mark)            before a write that is of no use unless it is answered
    ...
    await sync.wait(mark)             raises where the server was lost in between

The link of a mark is opened before the write. So it is noticed when a server was restarted and
came back without the tail of its file, whatever it answers now.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.schemas.counted import counted
from penstock.schemas.errors import NotDurable, QueueUnreachable
from penstock.schemas.redis.link import Link, LinkLost, ServerRefused, pack
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import Address

Durability = Literal["server", "fsync", "replicas"]
log = logging.getLogger(__name__)
WAIT_SHARE = 0.8  # share of a link's time-out: the server answers before the link is lost
TOUCH_TTL_S = 60
ASK_AGAIN_MS = 100  # replicas say by themselves what is on their disk but once a second
RETRY_AFTER_MS = 1000  # what lacks is looked for again at each try
UNKNOWN_COMMAND = "unknown command"


@dataclass(slots=True, eq=False)
class Mark:
    """A link to one server, and the rounds of waiting on it."""

    address: Address
    link: Link
    prefix: str
    running: asyncio.Task[None] | None = None
    next: asyncio.Task[None] | None = None
    is_proven: bool = False  # a round on it has ended well


class Sync(Protocol):
    async def begin(self, prefix: str) -> Mark | None:
        """Return a mark for `wait`, before the write or read. Raises QueueUnreachable."""

    async def prove(self, mark: Mark | None) -> None:
        """Wait once where nobody has yet waited well on this mark. Raises NotDurable.

        So what could not be answered is not written either, but for what was under way when a disk
        or replica failed.
        """

    async def wait(self, mark: Mark | None) -> None:
        """Wait until what was written or read since `begin` is on the disk.

        Raises NotDurable where it may not be there, or not any more.
        """

    def close(self) -> None:
        """Close the links. Nobody may wait any more."""


def sync_for(redis: Redis, durability: Durability) -> Sync:
    """Return what waits as `durability` says."""
    return NoSync() if durability == "server" else GroupSync(redis, durability)


class NoSync:
    """A Sync that does nothing, for `durability=server`: the server's own writing is enough."""

    async def begin(self, prefix: str) -> None:
        return None

    async def prove(self, mark: Mark | None) -> None:
        return None

    async def wait(self, mark: Mark | None) -> None:
        return None

    def close(self) -> None:
        return None


class GroupSync:
    """The Sync for durability `fsync` and `replicas`.

    Without WAITAOF `fsync` takes a server with appendfsync always, and `replicas` is content with a
    replica's memory.
    """

    def __init__(self, redis: Redis, durability: Durability = "fsync") -> None:
        self._redis = redis
        self._num_replicas = int(durability == "replicas")
        self._where = "the disk and a replica" if self._num_replicas else "the disk"
        self._wait_ms = int(redis.place.timeout_s * 1000 * WAIT_SHARE)
        self._marks: dict[Address, Mark] = {}
        self._openings: dict[Address, asyncio.Task[Mark]] = {}
        self._failures: set[Address] = set()  # the log tells of each once

    async def begin(self, prefix: str) -> Mark:
        try:
            address = await self._redis.find(prefix)
            mark = self._marks.get(address)
            if mark is None or mark.link.loss.done():
                if address not in self._openings:
                    self._openings[address] = asyncio.create_task(self._open(address, prefix))
                mark = await asyncio.shield(self._openings[address])
        except (LinkLost, ServerRefused) as error:
            self._redis.doubt()
            raise QueueUnreachable(f"Redis could not be reached: {error}") from error
        return mark

    async def prove(self, mark: Mark | None) -> None:
        assert mark is not None
        if not mark.is_proven:
            await self.wait(mark)

    async def wait(self, mark: Mark | None) -> None:
        assert mark is not None
        if mark.next is None:  # a running round may have begun before our write
            mark.next = asyncio.create_task(self._round(mark))
            mark.next.add_done_callback(asyncio.Task.exception)  # where all who wait are cancelled
        try:
            await asyncio.shield(mark.next)
        except (LinkLost, ServerRefused) as error:
            raise NotDurable(
                f"it is not known to be on {self._where}: {error}", retry_after_ms=RETRY_AFTER_MS
            ) from error

    def close(self) -> None:
        for mark in self._marks.values():
            mark.link.close()

    async def _open(self, address: Address, prefix: str) -> Mark:
        try:
            link = await self._redis.open(address)
            mark = self._marks[address] = Mark(address, link, prefix)
            return mark
        finally:
            del self._openings[address]

    async def _round(self, mark: Mark) -> None:
        before = mark.running
        if before is not None:
            await asyncio.wait([before])
        mark.running, mark.next = mark.next, None
        try:
            if before is not None and (error := before.exception()):
                raise error  # it closed the link
            await self._reach(mark)
        except (LinkLost, ServerRefused) as error:
            mark.link.close(f"{error}")
            self._redis.doubt()
            if mark.address not in self._failures:
                effect = "jobs are refused and tokens held back: nothing is known to be on"
                log.warning("%s %s: %s", effect, self._where, error)
            self._failures.add(mark.address)
            raise
        mark.is_proven = True
        if mark.address in self._failures:
            log.info("what is written is on %s again", self._where)
        self._failures.discard(mark.address)

    async def _reach(self, mark: Mark) -> None:
        """Wait for all that was written on this server so far. Raises LinkLost or ServerRefused."""
        # WAIT and WAITAOF wait for what their own connection wrote, and so for all before it.
        await mark.link.ask(pack("SET", f"{mark.prefix}synced", 1, "EX", TOUCH_TTL_S))
        if self._num_replicas and not await mark.link.ask(pack("WAIT", 1, self._wait_ms)):
            raise LinkLost(await self._what_replicas_lack(mark))
        give_up_s, reply = time.monotonic() + self._wait_ms / 1000, None
        while time.monotonic() < give_up_s:
            try:
                command = pack("WAITAOF", 1, self._num_replicas, ASK_AGAIN_MS)
                match reply := await mark.link.ask(command):
                    case [1, int() as num_replicas] if num_replicas >= self._num_replicas:
                        return
            except ServerRefused as error:
                if UNKNOWN_COMMAND in str(error):
                    return  # for fsync appendfsync is always, as was checked at the start
                raise
        match reply:
            case [1, _]:
                raise LinkLost(
                    f"a replica of {mark.address} has it in memory, and not on its disk in"
                    f" {self._wait_ms} ms; set appendonly yes there, or look at its disk"
                )
        raise LinkLost(f"the disk of {mark.address} did not take it in {self._wait_ms} ms")

    async def _what_replicas_lack(self, mark: Mark) -> str:
        match await mark.link.ask(pack("ROLE")):
            case [b"master", _, [_, *_] as replicas]:
                return (
                    f"{mark.address} has {counted(len(replicas), 'replica')}, of which none"
                    f" confirmed it in {self._wait_ms} ms; look whether it hangs or lags"
                )
        return f"{mark.address} has no replica; start one that follows it"
