"""Tells whether housekeeping runs: its chores sign a key that goes soon after the last of them."""

from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis

SIGNATURE = f"{CHORES}signature"
KEPT_S = 10  # it is renewed each second


class HousekeepingSignature:
    """The signature of all housekeeping processes together. Each method raises QueueUnreachable."""

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def renew(self) -> None:
        await self._connection.call("SET", SIGNATURE, 1, "EX", KEPT_S)

    async def is_there(self) -> bool:
        return await self._connection.call("EXISTS", SIGNATURE) == 1
