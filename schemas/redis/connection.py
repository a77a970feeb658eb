"""Calls of Redis, which fail rather than hang, and runs of its Lua scripts.

Every script is idempotent, so a call may be repeated after an ambiguous failure, and is.
"""

from penstock.schemas.errors import BodyTooLarge, QueueFull, QueueUnreachable
from penstock.schemas.redis.link import LinkLost, Reply, ServerRefused, Word
from penstock.schemas.redis.script import script_text
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.url import parse


def connect(url: str) -> Redis:
    """Return the Redis that a URL names, which connects at the first call. Raises BadUrl."""
    return Redis(parse(url))


class Connection:
    """Runs commands and scripts, and turns failures into the errors of this project."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    async def call(self, *command: Word) -> Reply:
        """Run a command, and repeat it after a failure that left open whether it was carried out.

        Raises BodyTooLarge, QueueFull or QueueUnreachable.
        """
        try:
            return await self.redis.call(*command)
        except ServerRefused as error:
            if error.code == "TOOLARGE":
                raise BodyTooLarge(f"Redis takes no more in one piece: {error}") from error
            if error.code == "OOM":
                raise QueueFull("the queue's memory is full", retry_after_ms=5000) from error
            raise QueueUnreachable(f"Redis refused {command[0]!r}: {error}") from error
        except LinkLost as error:
            raise QueueUnreachable(f"Redis could not be reached: {error}") from error

    async def run(self, script: str, prefix: str, *args: Word) -> list[bytes]:
        """Run a script of `schemas/scripts`. Each returns a flat list of strings."""
        text, digest = script_text(script)
        try:
            reply = await self.call("EVALSHA", digest, 1, prefix, *args)
        except QueueUnreachable as error:
            if not is_unknown(error):
                raise
            reply = await self.call("EVAL", text, 1, prefix, *args)
        return texts_of(reply)


def is_unknown(error: QueueUnreachable) -> bool:
    """Return whether the server lacks the script: it is new or restarted, or forgot all scripts."""
    return isinstance(error.__cause__, ServerRefused) and error.__cause__.code == "NOSCRIPT"


def is_forbidden(error: QueueUnreachable) -> bool:
    """Return whether the user of Redis may not do what failed."""
    return isinstance(error.__cause__, ServerRefused) and error.__cause__.code == "NOPERM"


def texts_of(reply: Reply) -> list[bytes]:
    assert isinstance(reply, list)
    return [item if isinstance(item, bytes) else str(item).encode() for item in reply]
