"""Runs an operator's command, and prints one line that says what to do if it fails."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from pydantic import Field

from penstock.schemas.errors import PenstockError, QueueUnreachable
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.redis.url import RedisUrlSetting


class OperatorCommand(Settings):
    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    as_json: bool = Field(False, alias="json", description="JSON instead of a table")


Command = TypeVar("Command", bound=OperatorCommand)


class CommandRefused(Exception):
    """Raised when a command cannot be done; the message says what is wrong and what to do."""


def dispatch(
    program: str,
    usage: str,
    commands: Mapping[str, type[Command]],
    argv: Sequence[str],
    work: Callable[[Command], Coroutine[None, None, None]],
) -> int:
    """Run the one of several commands that the first word names, and return its exit status."""
    name, words = (argv[0], argv[1:]) if argv else ("", [])
    if name not in commands:
        print(usage, file=sys.stderr)
        return 0 if name in ("-h", "--help") else BAD_USAGE
    own = f"{program} {name}"
    return run(own, work(load_settings(commands[name], own, words)))


def run(command: str, work: Coroutine[None, None, None]) -> int:
    """Run a command's work and return the exit status: 0, or 1 if it was refused or failed."""
    try:
        asyncio.run(work)
    except QueueUnreachable as refusal:
        print(f"{command}: {refusal.message} (--redis-url says where it is)", file=sys.stderr)
    except (PenstockError, CommandRefused, BadSecret, OSError) as refusal:
        print(f"{command}: {refusal}", file=sys.stderr)
    else:
        return 0
    return 1
