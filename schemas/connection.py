"""Redis, asked so that it fails rather than hangs, and the Lua scripts that run there.

Every script is idempotent, so a call may be repeated after an ambiguous failure, and is.
"""

import asyncio
import hashlib
from collections.abc import Awaitable
from functools import cache
from pathlib import Path
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from schemas.errors import QueueFull, QueueUnreachable

SCRIPTS = Path(__file__).parent / "scripts"
STANDALONE = {"enqueue"}  # the others are read after lane.lua

T = TypeVar("T")
Reply = bytes | int | None | list["Reply"]


def connect(url: str) -> Redis:
    """A pool of connections that fail rather than hang, and retry what failed ambiguously."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=64,
        timeout=20,
        socket_timeout=5,
        socket_connect_timeout=5,
        socket_keepalive=True,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), 3),
        retry_on_error=[ConnectionError, TimeoutError],
    )
    return Redis.from_pool(pool)


async def heeding(work: Awaitable[T]) -> T:
    """Await a call of redis-py, and be cancelled even where it loses the cancellation.

    It writes under `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that meets the
    end of the write; the task would then run on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await work
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class Connection:
    """Runs commands and scripts, and speaks of failures as this project does."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    async def call(self, *command: str | bytes | int) -> Reply:
        try:
            work = self.redis.execute_command(*command)  # type: ignore[no-untyped-call]
            reply: Reply = await heeding(work)
            return reply
        except NoScriptError:
            raise
        except OutOfMemoryError as error:
            raise QueueFull("the queue's memory is full", retry_after_ms=5000) from error
        except ResponseError as error:
            raise QueueUnreachable(f"Redis refused {command[0]!r}: {error}") from error
        except (RedisError, OSError) as error:
            raise QueueUnreachable(f"Redis could not be reached: {error}") from error

    async def run(self, script: str, prefix: str, *args: str | bytes | int) -> list[bytes]:
        """Run a script of `schemas/scripts`. Each returns a flat list of strings."""
        text, digest = script_text(script)
        try:
            reply = await self.call("EVALSHA", digest, 1, prefix, *args)
        except NoScriptError:  # a new server, a restarted one, or its cache was flushed
            reply = await self.call("EVAL", text, 1, prefix, *args)
        return texts_of(reply)


@cache
def script_text(name: str) -> tuple[str, str]:
    """A script as Redis gets it, and the digest that Redis gives it."""
    own = (SCRIPTS / f"{name}.lua").read_text()
    text = own if name in STANDALONE else (SCRIPTS / "lane.lua").read_text() + own
    return text, hashlib.sha1(text.encode()).hexdigest()


def texts_of(reply: Reply) -> list[bytes]:
    assert isinstance(reply, list)
    return [item if isinstance(item, bytes) else str(item).encode() for item in reply]
