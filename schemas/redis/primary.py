"""The search for the primary among several servers, by asking them or their sentinels."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.schemas.redis.link import Link, LinkLost, Reply, ServerRefused, open_link, pack
from penstock.schemas.redis.url import Address, RedisUrl

GetLink = Callable[[Address], Awaitable[Link]]
ROLE = pack("ROLE")


class Primary:
    """Finds the primary, and remembers it until it is doubted. All callers share one search."""

    def __init__(self, place: RedisUrl, get_link: GetLink) -> None:
        self._place = place
        self._get_link = get_link
        self._primary: Address | None = None
        self._search: asyncio.Task[Address] | None = None

    async def find(self, key: bytes) -> Address:
        if self._primary is not None:
            return self._primary
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._look())
        self._primary = await asyncio.shield(self._search)
        return self._primary

    def doubt(self) -> None:
        self._primary = None

    def moved(self, slot: int, address: Address) -> None:
        raise LinkLost(f"{address} has slot {slot}: a cluster's URL begins with redis+cluster://")

    async def _look(self) -> Address:
        raise NotImplementedError

    async def _is_primary(self, address: Address) -> bool:
        role = await (await self._get_link(address)).ask(ROLE)
        return isinstance(role, list) and role[0] == b"master"


class Hosts(Primary):
    """Finds the first server of the URL that says it is primary. A single one is not asked."""

    async def _look(self) -> Address:
        first, *rest = self._place.addresses
        if not rest:
            return first
        verdicts = await asyncio.gather(
            *map(self._is_primary, self._place.addresses), return_exceptions=True
        )
        for address, verdict in zip(self._place.addresses, verdicts, strict=True):
            if verdict is True:
                return address
        words = "; ".join(
            f"{address} is a replica" if verdict is False else str(verdict)
            for address, verdict in zip(self._place.addresses, verdicts, strict=True)
        )
        raise LinkLost(f"no server is primary: {words}")


class Sentinels(Primary):
    """Finds the primary that a sentinel names, if that server says itself that it is primary."""

    async def _look(self) -> Address:
        errors = []
        for sentinel in self._place.addresses:
            try:
                address = await self._ask(sentinel)
                if await self._is_primary(address):
                    return address
                errors.append(f"{sentinel} names {address}, which is a replica")
            except (LinkLost, ServerRefused) as error:
                errors.append(f"{sentinel}: {error}")
        raise LinkLost(f"no primary of {self._place.service!r}: {'; '.join(errors)}")

    async def _ask(self, sentinel: Address) -> Address:
        link = await open_link(sentinel, self._place, self._place.sentinel_login, 0)
        try:
            reply = await link.ask(pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._place.service))
        finally:
            link.close()
        return _address(reply, self._place.service)


def _address(reply: Reply, service: str) -> Address:
    match reply:
        case [bytes() as host, bytes() as port]:
            return Address(host.decode(), int(port))
    raise LinkLost(f"service: {service!r} is not known there")
