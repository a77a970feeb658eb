"""Subscriptions that outlast every loss of a connection, and report each loss.

On a cluster a channel is subscribed on the server of its hash tag, where its readers are counted.
"""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.redis.link import Link, LinkLost, Reply, ServerRefused, pack
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import Address

RECONNECT_S = 0.2
LOOK_S = 1.0  # how often it is checked that each channel is on the right server
SUBSCRIBE_S = 5.0


class Subscriber:
    """Keeps channels subscribed.

    `hear` gets channel and message; `miss` is called when messages may have been missed.
    """

    def __init__(
        self, redis: Redis, hear: Callable[[bytes, bytes], None], miss: Callable[[], None]
    ) -> None:
        self._redis = redis
        self._hear = hear
        self._miss = miss
        self._confirmations: dict[str, asyncio.Event] = {}
        self._homes: dict[str, Address] = {}
        self._links: dict[Address, Link] = {}
        self._openings: dict[Address, asyncio.Task[None]] = {}
        self._change = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        keepers = [] if self._keeper is None else [self._keeper]
        for task in (tasks := [*keepers, *self._openings.values()]):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    async def subscribe(self, channel: str) -> None:
        """Return once Redis sends this channel here. Raises QueueUnreachable."""
        confirmation = self._confirmations.setdefault(channel, asyncio.Event())
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        if confirmation.is_set():
            return
        self._change.set()
        try:
            async with asyncio.timeout(SUBSCRIBE_S):
                await confirmation.wait()
        except TimeoutError:
            raise QueueUnreachable("Redis could not be reached: no subscription") from None

    async def _keep(self) -> None:
        while True:
            self._change.clear()
            is_lacking = False
            for channel in list(self._confirmations):
                try:
                    self._place(channel, await self._redis.find(channel))
                except (LinkLost, ServerRefused):
                    is_lacking = True
            if is_lacking:
                await asyncio.sleep(RECONNECT_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._change.wait()

    def _place(self, channel: str, address: Address) -> None:
        home = self._homes.get(channel)
        if home == address:
            return
        if home is not None:  # the slot moved to another server
            self._links[home].tell(pack("UNSUBSCRIBE", channel))
            del self._homes[channel]
            self._confirmations[channel].clear()
            self._miss()
        if address in self._links:
            self._homes[channel] = address
            self._links[address].tell(pack("SUBSCRIBE", channel))
        elif address not in self._openings:
            self._openings[address] = asyncio.create_task(self._open(address))

    async def _open(self, address: Address) -> None:
        try:
            link = await self._redis.open(address)
        except (LinkLost, ServerRefused):
            self._redis.doubt()
            await asyncio.sleep(RECONNECT_S)
        else:
            link.listen(partial(self._take, address))
            self._links[address] = link
            link.loss.add_done_callback(lambda _: self._lose(address, link))
        finally:
            del self._openings[address]
            self._change.set()

    def _lose(self, address: Address, link: Link) -> None:
        if self._links.get(address) is not link:
            return
        del self._links[address]
        for channel in [name for name, at in self._homes.items() if at == address]:
            del self._homes[channel]
            self._confirmations[channel].clear()
        self._redis.doubt()
        self._miss()
        self._change.set()

    def _take(self, address: Address, reply: Reply) -> None:
        match reply:
            case [b"message", bytes() as channel, bytes() as message]:
                self._hear(channel, message)
            case [b"subscribe", bytes() as channel, _]:
                name = channel.decode()
                if self._homes.get(name) == address:
                    self._confirmations[name].set()
            case ServerRefused():
                self._links[address].close(str(reply))
