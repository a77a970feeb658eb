"""The map of a cluster, which tells the server of a key by the slot that the key is in."""

import asyncio
import binascii
import random
from collections.abc import Iterator

from penstock.schemas.redis.link import LinkLost, Reply, ServerRefused, pack
from penstock.schemas.redis.primary import GetLink
from penstock.schemas.redis.url import Address, RedisUrl

NUM_SLOTS = 16384
SLOTS = pack("CLUSTER", "SLOTS")


def slot_of(key: bytes) -> int:
    """Return a key's slot: CRC16 of what is between the first { and the next }, or of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


class Cluster:
    """The map of slots to servers, asked for again when a server contradicts it or is lost."""

    def __init__(self, place: RedisUrl, get_link: GetLink) -> None:
        self._place = place
        self._get_link = get_link
        self._owners: dict[int, Address] = {}
        self._is_doubted = True
        self._refresh: asyncio.Task[None] | None = None

    async def find(self, key: bytes) -> Address:
        if self._is_doubted:
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._ask_for_map())
            await asyncio.shield(self._refresh)
        slot = slot_of(key)
        if not key and self._owners:
            return random.choice(list(self._owners.values()))
        if slot not in self._owners:
            self._is_doubted = True
            raise LinkLost(f"no server of the cluster has slot {slot}")
        return self._owners[slot]

    def doubt(self) -> None:
        self._is_doubted = True

    def moved(self, slot: int, address: Address) -> None:
        self._owners[slot] = address
        self._is_doubted = True  # one slot seldom moves alone

    async def _ask_for_map(self) -> None:
        addresses = list(dict.fromkeys([*self._owners.values(), *self._place.addresses]))
        random.shuffle(addresses)
        errors = []
        for address in addresses:
            try:
                async with asyncio.timeout(self._place.timeout_s / 2):
                    reply = await (await self._get_link(address)).ask(SLOTS)
                owners = dict(owners_of(reply, address))
            except (LinkLost, ServerRefused, TimeoutError) as error:
                errors.append(f"{address}: {error or 'no answer'}")
                continue
            self._owners, self._is_doubted = owners, False
            return
        raise LinkLost(f"no server of the cluster answers: {'; '.join(errors)}")


def owners_of(reply: Reply, server: Address) -> Iterator[tuple[int, Address]]:
    """Yield slots with their servers, out of a reply to CLUSTER SLOTS.

    A server that does not know its own name is `server`, which was asked.
    """
    assert isinstance(reply, list)
    for entry in reply:
        match entry:
            case [int() as first, int() as last, [host, int() as port, *_], *_]:
                name = host.decode() if isinstance(host, bytes) else ""
                owner = Address(name if name and name != "?" else server.host, port)
                yield from ((slot, owner) for slot in range(first, last + 1))
