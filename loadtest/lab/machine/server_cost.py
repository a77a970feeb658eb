"""The work of a Redis server between two moments, by its own counts."""

from dataclasses import dataclass

from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis

_SCRIPTS = ("eval", "evalsha")
_AROUND = (*_SCRIPTS, "info", "config", "ping", "script", "client", "hello", "select")


@dataclass(frozen=True, slots=True)
class ServerCost:
    """The mean of some calls.

    commands   run by the calls' scripts
    script_us  the time in which the server answered nobody else
    """

    commands: float
    script_us: float


class Meter:
    """Reads the counters of a server that nobody else uses meanwhile."""

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def begin(self) -> None:
        await self._connection.call("CONFIG", "RESETSTAT")

    async def cost(self, num_calls: int) -> ServerCost:
        """Return the mean cost of so many calls since `begin`."""
        commands = script_us = 0
        for name, fields in (await self._info("commandstats")).items():
            word = name.removeprefix("cmdstat_").partition("|")[0]
            counts = dict(field.split("=") for field in fields.split(","))
            commands += 0 if word in _AROUND else int(counts["calls"])
            script_us += int(counts["usec"]) if word in _SCRIPTS else 0
        return ServerCost(commands / num_calls, script_us / num_calls)

    async def memory_bytes(self) -> int:
        """Return what its data takes, without the buffers of its clients."""
        return int((await self._info("memory"))["used_memory_dataset"])

    async def _info(self, section: str) -> dict[str, str]:
        reply = await self._connection.call("INFO", section)
        assert isinstance(reply, bytes)
        lines = [line.partition(":") for line in reply.decode().splitlines() if ":" in line]
        return {name: value for name, _, value in lines}
