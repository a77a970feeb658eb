"""Runs work in a thread if it is large enough to hold up the event loop, tenants in turn.

Such work is the parsing and dumping of what callers sent or asked for.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.schemas.process.fair_places import FairPlaces

INLINE_BYTES = 16 * 1024  # work on less is done sooner than a thread wakes

P = ParamSpec("P")
T = TypeVar("T")


class OffLoop:
    """Runs one piece of work at a time in a thread. More would only compete for the interpreter.

    No single C call in such work may last more than some milliseconds: it holds the interpreter,
    and nothing else runs meanwhile.
    """

    def __init__(self) -> None:
        self._places = FairPlaces(1)

    async def run(
        self, tenant: str, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return `work(*args, **kwargs)`, done for a tenant on about `num_bytes` bytes."""
        if num_bytes <= INLINE_BYTES:
            return work(*args, **kwargs)
        async with self._places.place(tenant):
            return await asyncio.to_thread(work, *args, **kwargs)
