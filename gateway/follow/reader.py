"""The events that one reader of a job has not read yet.

The engine and the other readers never wait for a slow one.
"""

import asyncio
import time

from penstock.schemas.event import Event


class Reader:
    """A buffer of at most `max_unread` live events of one job, for one reader.

    When it is full, or an event may have been lost, it drops everything until `begin`. All that is
    dropped is in the log, so a slow reader goes on from there, at its own speed.
    """

    __slots__ = ("_events", "_is_missed", "_max_unread", "_waiter", "_waits_since_s")

    def __init__(self, max_unread: int) -> None:
        self._events: list[Event] = []
        self._is_missed = False
        self._max_unread = max_unread
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since_s = 0.0

    def put(self, event: Event) -> None:
        if len(self._events) >= self._max_unread:
            self.miss()
        elif not self._is_missed:
            self._events.append(event)
            self._wake()

    def miss(self) -> None:
        """Note that an event may be missing, and drop those that wait: the log has them all."""
        self._events = []
        self._is_missed = True
        self._wake()

    def begin(self) -> None:
        """Keep what is published from now on. Call this before the log is read."""
        self._events = []
        self._is_missed = False

    async def wait(self) -> None:
        """Wait until there is something to take."""
        if not self._events and not self._is_missed:
            self._waits_since_s = time.monotonic()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def take(self) -> list[Event]:
        """Wait for events and return all of them.

        An empty list means that some were missed, so the log must be read.
        """
        await self.wait()
        events, self._events = self._events, []
        return events

    def is_silent_for(self, seconds: float) -> bool:
        return self._waiter is not None and time.monotonic() - self._waits_since_s >= seconds

    @property
    def num_unread(self) -> int:
        return len(self._events)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
