"""What waits for a chore, in Redis: units of work that are due, and who has them for a while."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from penstock.schemas.errors import PenstockError
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis

Kind = Literal["webhooks", "batches"]


@dataclass(slots=True)
class Held:
    """A unit that is ours until its lease lapses, and when it shall be looked at again."""

    unit: str
    again_ms: int = field(default=-1)  # -1: not before an item of it is due


class Due:
    """The units of one kind. They are all in Redis: what nobody takes up stays due.

    webhooks   a unit is a receiving host, an item a webhook
    batches    a unit is a batch, an item a line whose job ended
    """

    def __init__(self, redis: Redis, kind: Kind) -> None:
        self.kind = kind
        self._connection = Connection(redis)

    async def poke(self, unit: str, item: str, delay_ms: int = 0) -> None:
        """An item will be due; one that is there already keeps its time."""
        await self._run("poke", unit, item, delay_ms)

    async def units(self, most: int = 256) -> list[tuple[str, int]]:
        """Units that are due, each with its turn, which `holding` asks for."""
        reply = [text.decode() for text in await self._run("due", most)]
        return [(reply[at], int(reply[at + 1])) for at in range(0, len(reply), 2)]

    async def items(self, unit: str, most: int) -> list[str]:
        return [text.decode() for text in await self._run("due_items", unit, most)]

    @asynccontextmanager
    async def holding(self, unit: str, turn: int, lease_ms: int) -> AsyncIterator[Held | None]:
        """Have a unit, by a lease renewed meanwhile; none when the turn was somebody's already."""
        if await self._run("take", unit, turn, lease_ms) != [b"taken"]:
            yield None
            return
        held = Held(unit)
        renewing = asyncio.create_task(self._renew(unit, turn + 1, lease_ms))
        try:
            yield held
        except BaseException:
            held.again_ms = 1000  # whoever takes it up begins where this one failed
            raise
        finally:
            renewing.cancel()
            await self._run("put_back", unit, turn + 1, held.again_ms)

    async def _renew(self, unit: str, turn: int, lease_ms: int) -> None:
        reply = [b"ok"]
        while reply == [b"ok"]:
            await asyncio.sleep(lease_ms / 3000)
            with suppress(PenstockError):  # then the next time, or the lease lapses
                reply = await self._run("hold_on", unit, turn, lease_ms)

    async def _run(self, script: str, *args: str | int) -> list[bytes]:
        return await self._connection.run(script, CHORES, self.kind, *args)


async def fields_of(connection: Connection, key: str) -> tuple[int, dict[str, str]]:
    """The time in milliseconds by Redis's clock, and a hash of the chores'."""
    reply = await connection.run("fields", CHORES, key)
    now_ms, *texts = [text.decode(errors="replace") for text in reply]
    return int(now_ms), dict(zip(texts[::2], texts[1::2], strict=True))


async def server_time_ms(connection: Connection) -> int:
    """By Redis's clock, as everything that expires: hosts may be wrong about the time."""
    return (await fields_of(connection, "none"))[0]
