"""Work on what callers sent or asked for that would hold up the event loop, beside it."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

INLINE_BYTES = 16 * 1024  # less is done sooner than a thread is woken, whatever it holds

P = ParamSpec("P")
T = TypeVar("T")


class OffLoop:
    """One piece of work at a time, in a thread: more would only fight for the interpreter.

    What is done there holds no single call above some milliseconds: nothing else runs meanwhile.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def run(
        self, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `work` returns of its arguments, which hold about so many bytes."""
        if num_bytes <= INLINE_BYTES:
            return work(*args, **kwargs)
        async with self._turn:
            return await asyncio.to_thread(work, *args, **kwargs)
