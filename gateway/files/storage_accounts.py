"""Counts what each tenant has stored, in Redis and on disk: one account of bytes, in Redis.

Scripts that store charge it themselves. This is for what is stored elsewhere than the account is,
or is on its way.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import PenstockError, StorageQuotaExceeded
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.link import Word
from penstock.schemas.redis.servers import Redis

NO_QUOTA = 2**53  # bytes, or files
ON_ITS_WAY_S = 7200  # after that what a lost process received is swept


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Tells what a tenant has stored: bytes, in so many things."""

    tenant: str
    used_bytes: int
    num_things: int

    def shape(self, most_bytes: int | None = None) -> JsonObject:
        fields: JsonObject = {
            "tenant": self.tenant,
            "used_bytes": self.used_bytes,
            "num_things": self.num_things,
        }
        return fields if most_bytes is None else fields | {"max_bytes": most_bytes}


class StorageAccounts:
    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def reserve(
        self, tenant: str, name: str, num_bytes: int, kept_s: int, most_bytes: int
    ) -> bool:
        """Count something that is about to be stored; False: it was counted before.

        Raises StorageQuotaExceeded.
        """
        reply = await self._run("storage/reserve", tenant, name, num_bytes, kept_s, most_bytes)
        refuse_above(reply, most_bytes)
        return reply[0] == b"ok"

    async def release(self, tenant: str, name: str) -> None:
        """Take back what is not stored any more. It may be repeated."""
        await self._run("storage/give_back", tenant, name)

    async def resize(self, tenant: str, name: str, num_bytes: int) -> None:
        """Count other bytes of something that is still stored."""
        await self._run("storage/resize", tenant, name, num_bytes)

    @asynccontextmanager
    async def room(
        self, tenant: str, name: str, num_bytes: int, most_bytes: int
    ) -> AsyncIterator[None]:
        """Hold room for what is received, until it is stored or given up.

        Raises StorageQuotaExceeded.
        """
        await self.reserve(tenant, name, num_bytes, ON_ITS_WAY_S, most_bytes)
        try:
            yield
        finally:
            with suppress(PenstockError):  # then it goes by itself
                await self.release(tenant, name)

    async def check(self, tenant: str, most_bytes: int) -> None:
        """Raise StorageQuotaExceeded where a tenant has all that it may have."""
        use = await self.used(tenant)
        if use.used_bytes >= most_bytes:
            raise StorageQuotaExceeded(use.used_bytes, 1, most_bytes)

    async def used(self, tenant: str) -> StorageUse:
        num_bytes, count = await self._run("storage/used", tenant)
        return StorageUse(tenant, int(num_bytes), int(count))

    async def all(self) -> list[StorageUse]:
        """Return what all tenants have stored, the most first. It forgets what is gone."""
        reply = await self._run("storage/all")
        uses = [
            StorageUse(tenant.decode(), int(num_bytes), int(count))
            for tenant, num_bytes, count in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        ]
        return sorted(uses, key=lambda use: -use.used_bytes)

    async def _run(self, script: str, *args: Word) -> list[bytes]:
        return await self._connection.run(script, CHORES, *args)


def refuse_above(reply: Sequence[bytes], most_bytes: int) -> None:
    """Raise StorageQuotaExceeded where a script that stores refuses for the tenant's quota."""
    if reply[0] == b"quota":
        raise StorageQuotaExceeded(int(reply[1]), int(reply[2]), most_bytes)
