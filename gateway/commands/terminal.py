"""Runs an operator's command, and prints one line that says what to do if it fails."""

import asyncio
import sys
from collections.abc import Coroutine

from penstock.schemas.errors import PenstockError, QueueUnreachable
from penstock.schemas.secret import BadSecret


class CommandRefused(Exception):
    """Raised when a command cannot be done; the message says what is wrong and what to do."""


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
