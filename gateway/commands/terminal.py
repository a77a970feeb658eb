"""How an operator's command ends: with its work done, or with one line that says what to do."""

import asyncio
import sys
from collections.abc import Coroutine

from penstock.schemas.errors import PenstockError, QueueUnreachable
from penstock.schemas.secret import BadSecret


class CommandRefused(Exception):
    """The message says what is wrong and what to do."""


def run(command: str, work: Coroutine[None, None, None]) -> int:
    """The exit status: 1 for what was refused or could not be."""
    try:
        asyncio.run(work)
    except QueueUnreachable as refusal:
        print(f"{command}: {refusal.message} (--redis-url says where it is)", file=sys.stderr)
    except (PenstockError, CommandRefused, BadSecret, OSError) as refusal:
        print(f"{command}: {refusal}", file=sys.stderr)
    else:
        return 0
    return 1
