"""Redis on one or several servers: finds the server of a key, links to it, and tries again.

Every command may be repeated after an ambiguous failure, and is, within a bound.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from penstock.schemas.redis.cluster import Cluster
from penstock.schemas.redis.link import Link, LinkLost, Reply, ServerRefused, Word, open_link, pack
from penstock.schemas.redis.primary import Hosts, Sentinels
from penstock.schemas.redis.url import Address, Kind, RedisUrl

PAUSES_S = (0.02, 0.1, 0.3)  # between attempts of one call
BACK_OFF_S = (0.0, 0.02, 0.05, 0.1, 0.2)  # by the number of failures to connect in a row
MAX_REDIRECTIONS = 5
BLOCKING_COMMANDS = {"XREAD", "XREADGROUP", "BLPOP", "BLMOVE", "WAIT"}  # each on a link of its own
# A server closes the link on which a longer command comes, and with it cuts off all who share it.
MAX_COMMAND_BYTES = 2**29
MAX_BLOCK_S = 10.0  # longer than any blocking command waits
# Errors that may pass in a moment, or on another server. ASK too is waited out, never followed:
# while a slot moves key by key its new server has only a part of the lane, and a script needs all
# of it. The old server refuses scripts meanwhile, since the key that they name, the prefix, is
# never there.
TRANSIENT = {
    "ASK", "LOADING", "BUSY", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED",
}  # fmt: skip


class Finder(Protocol):
    """Finds the server that is to be asked."""

    async def find(self, key: bytes) -> Address:
        """Return the server that has a key. Raises LinkLost or ServerRefused."""

    def doubt(self) -> None:
        """Look again before the next answer, because a server did not do as it should."""

    def moved(self, slot: int, address: Address) -> None:
        """Note that, as a server said, another one has this slot."""


class Links:
    """The shared links, at most one to each server, opened when they are first asked for."""

    def __init__(self, place: RedisUrl) -> None:
        self.place = place
        self._links: dict[Address, Link] = {}
        self._openings: dict[Address, asyncio.Task[Link]] = {}
        self._num_failures: dict[Address, int] = {}
        self._is_closed = False

    async def get(self, address: Address) -> Link:
        if self._is_closed:
            raise LinkLost("closed")
        link = self._links.get(address)
        if link is not None and not link.loss.done():
            return link
        attempt = self._openings.get(address)
        if attempt is None:
            attempt = asyncio.create_task(self._open(address))
            self._openings[address] = attempt
            attempt.add_done_callback(lambda task: self._opened(address, task))
        return await asyncio.shield(attempt)  # other callers wait for it too

    async def open(self, address: Address, timeout_s: float = 0) -> Link:
        """Open a further link, which only the caller uses. Raises LinkLost or ServerRefused."""
        return await open_link(
            address, self.place, self.place.login, self.place.database, timeout_s
        )

    def close(self) -> None:
        self._is_closed = True
        for link in self._links.values():
            link.close()

    async def _open(self, address: Address) -> Link:
        try:
            self._links[address] = link = await self.open(address)
        except (LinkLost, ServerRefused):
            failures = self._num_failures.get(address, 0)
            self._num_failures[address] = failures + 1
            await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            raise
        self._num_failures.pop(address, None)
        if self._is_closed:
            link.close()
        return link

    def _opened(self, address: Address, task: asyncio.Task[Link]) -> None:
        del self._openings[address]
        if not task.cancelled():
            task.exception()  # the callers that waited have the error


class Redis:
    """A client of Redis, for commands and subscriptions, shared by tasks of one event loop."""

    def __init__(self, place: RedisUrl) -> None:
        self.place = place
        self._links = Links(place)
        self._finder = self._make_finder()
        self._idle: dict[Address, list[Link]] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._is_closed = True
        self._links.close()
        for links in self._idle.values():
            for link in links:
                link.close()
        self._idle.clear()
        await asyncio.sleep(0)  # for the transports to end

    async def call(self, *words: Word) -> Reply:
        """Run a command. Raises ServerRefused, or LinkLost where a few attempts reached none."""
        key, command = key_of(words), pack(*words)
        if len(command) > MAX_COMMAND_BYTES:
            raise ServerRefused(
                f"TOOLARGE a command of {len(command)} bytes; at most {MAX_COMMAND_BYTES}"
            )
        began_s = time.monotonic()
        give_up_s = began_s + max(2 * self.place.timeout_s, self.place.retry_s)
        for pause_s in _pauses_s(began_s + self.place.retry_s):
            try:
                return await self._attempt(key, command, words[0] in BLOCKING_COMMANDS)
            except (LinkLost, ServerRefused) as failure:
                if isinstance(failure, ServerRefused) and failure.code not in TRANSIENT:
                    raise
                if pause_s is None or time.monotonic() > give_up_s or self._is_closed:
                    raise
                self._finder.doubt()
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    async def find(self, key: str) -> Address:
        """Return the server where this key or channel lives, as far as is known."""
        return await self._finder.find(key.encode())

    def doubt(self) -> None:
        self._finder.doubt()

    async def open(self, address: Address) -> Link:
        """Open a link that nobody shares."""
        return await self._links.open(address)

    async def _attempt(self, key: bytes, command: bytes, blocks: bool) -> Reply:
        address = await self._finder.find(key)
        for _ in range(MAX_REDIRECTIONS):
            try:
                if blocks:
                    return await self._ask_alone(address, command)
                return await (await self._links.get(address)).ask(command)
            except ServerRefused as error:
                if error.code != "MOVED":
                    raise
                slot, address = redirection(error, address)
                self._finder.moved(slot, address)
        raise LinkLost(f"the servers of the cluster do not agree who has {key!r:.100}")

    async def _ask_alone(self, address: Address, command: bytes) -> Reply:
        """Run a blocking command on a link of its own, as it would keep other callers waiting."""
        idle = self._idle.setdefault(address, [])
        while idle and idle[-1].loss.done():
            idle.pop()
        timeout_s = self.place.timeout_s + MAX_BLOCK_S
        link = idle.pop() if idle else await self._links.open(address, timeout_s)
        try:
            reply = await link.ask(command)
        except ServerRefused:
            idle.append(link)
            raise
        except BaseException:
            link.close()  # it may wait on, and with it whoever came next
            raise
        if self._is_closed:
            link.close()
        else:
            idle.append(link)
        return reply

    def _make_finder(self) -> Finder:
        match self.place.kind:
            case Kind.HOSTS:
                return Hosts(self.place, self._links.get)
            case Kind.SENTINELS:
                return Sentinels(self.place, self._links.get)
            case Kind.CLUSTER:
                return Cluster(self.place, self._links.get)


def _pauses_s(until_s: float) -> Iterator[float | None]:
    """Yield the pauses between attempts, more of them until this time, and None after the last."""
    yield from PAUSES_S
    while time.monotonic() < until_s:
        yield PAUSES_S[-1]
    yield None


def key_of(words: tuple[Word, ...]) -> bytes:
    """Return the key that decides which server of a cluster is asked. Empty means any server."""
    match words[0]:
        case "EVAL" | "EVALSHA":
            key = words[3]
        case "XREAD" | "XREADGROUP":
            key = words[words.index("STREAMS") + 1]
        case "XGROUP" | "XINFO" | "OBJECT" | "MEMORY":
            key = words[2]
        case _:
            key = words[1] if len(words) > 1 else b""
    return key if isinstance(key, bytes) else str(key).encode()


def redirection(error: ServerRefused, server: Address) -> tuple[int, Address]:
    """Read slot and server out of `MOVED 3999 host:port`. Without a host it is `server`."""
    _, slot, place = str(error).split(" ", 2)
    host, _, port = place.rpartition(":")
    return int(slot), Address(host or server.host, int(port))
