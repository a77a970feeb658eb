"""Units of work in Redis that wait for a chore: which are due, and which a process holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from penstock.schemas.errors import PenstockError
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis

Kind = Literal["webhooks", "batches", "texts"]


@dataclass(slots=True)
class Held:
    """A unit that this process holds until its lease lapses, and when to look at it again."""

    unit: str
    again_ms: int = field(default=-1)  # after it is put back; -1 waits until an item is due


class Due:
    """The units of work of one kind. They are all in Redis: one that nobody takes stays due.

    webhooks   a unit is a receiving host and, after a space, a tenant; an item is a webhook
    batches    a unit is a batch, an item a line whose job ended
    texts      a unit is a tenant, an item a job or a conversation with a text to be moved to disk
    """

    def __init__(self, redis: Redis, kind: Kind) -> None:
        self.kind = kind
        self._connection = Connection(redis)

    async def poke(self, unit: str, item: str, delay_ms: int = 0) -> None:
        """Make an item due after a delay. An item that is there already keeps its time."""
        await self._run("units/poke", unit, item, delay_ms)

    async def units(self, most: int = 256, most_of_owner: int = 64) -> list[tuple[str, int]]:
        """Return the units that are due, each with its turn, which `holding` takes.

        With those that are held there are at most `most_of_owner` of one owner, as a tenant is of
        its hosts.
        """
        reply = [text.decode() for text in await self._run("units/due", most, most_of_owner)]
        return [(reply[at], int(reply[at + 1])) for at in range(0, len(reply), 2)]

    async def items(self, unit: str, most: int) -> list[str]:
        return [text.decode() for text in await self._run("units/due_items", unit, most)]

    async def done(self, unit: str, item: str) -> None:
        """Forget an item."""
        await self._connection.call("ZREM", f"{CHORES}items:{self.kind}:{unit}", item)

    @asynccontextmanager
    async def holding(self, unit: str, turn: int, lease_ms: int) -> AsyncIterator[Held | None]:
        """Hold a unit by a lease, which is renewed meanwhile.

        Yields None if this turn of the unit was taken already.
        """
        if await self._run("units/take", unit, turn, lease_ms) != [b"taken"]:
            yield None
            return
        lease = Held(unit)
        renewal = asyncio.create_task(self._renew(unit, turn + 1, lease_ms))
        try:
            yield lease
        except BaseException:
            lease.again_ms = 1000  # the next one begins where this one failed
            raise
        finally:
            renewal.cancel()
            await self._run("units/put_back", unit, turn + 1, lease.again_ms)

    async def _renew(self, unit: str, turn: int, lease_ms: int) -> None:
        reply = [b"ok"]
        while reply == [b"ok"]:
            await asyncio.sleep(lease_ms / 3000)
            with suppress(PenstockError):  # it is tried again, until the lease lapses
                reply = await self._run("units/hold_on", unit, turn, lease_ms)

    async def _run(self, script: str, *args: str | int) -> list[bytes]:
        return await self._connection.run(script, CHORES, self.kind, *args)


async def fields_of(connection: Connection, key: str) -> tuple[int, dict[str, str]]:
    """Return the time in milliseconds by Redis's clock, and the fields of a hash of the chores."""
    reply = await connection.run("units/fields", CHORES, key)
    now_ms, *texts = [text.decode(errors="replace") for text in reply]
    return int(now_ms), dict(zip(texts[::2], texts[1::2], strict=True))


async def server_time_ms(connection: Connection) -> int:
    """Return the time in milliseconds by Redis's clock.

    All that expires does so by this clock, because hosts may be wrong about the time.
    """
    return (await fields_of(connection, "none"))[0]
