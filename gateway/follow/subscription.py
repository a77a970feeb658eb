"""The one subscriber connection of a client process, and the readers that get its events.

A message holds the events of one step, for all jobs of one lane. Each is a line of JSON as the
scripts write it, `{"job_id":"...","event":{...}}`.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from penstock.gateway.follow.reader import Reader
from penstock.schemas.event import EVENT
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.subscriber import Subscriber

SILENCE_S = 5.0  # then the log is read: a lost end message delays a reader by this at most
MAX_LIVE_BYTES = 16 * 1024  # the largest event that is parsed in the event loop
MAX_UNREAD = 256  # events of one reader; past it the reader pages from the log
CROWD = 8  # readers of one job, who go on without waiting for turns
HEAD, MIDDLE = b'{"job_id":"', b'","event":'


class Subscription:
    """Gives readers the events that come on the channels, and tells them of lost connections."""

    def __init__(
        self, redis: Redis, silence_s: float = SILENCE_S, max_unread: int = MAX_UNREAD
    ) -> None:
        self._subscriber = Subscriber(redis, self._deliver, self._miss)
        self._silence_s = silence_s
        self._max_unread = max_unread
        self._readers: dict[str, set[Reader]] = {}
        self._watch_task: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])
        await self._subscriber.aclose()

    async def subscribe(self, channel: str) -> None:
        """Subscribe to a channel. It returns once Redis has confirmed it."""
        await self._subscriber.subscribe(channel)

    @contextlib.contextmanager
    def reader(self, job_id: str) -> Iterator[Reader]:
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch())
        reader = Reader(self._max_unread)
        self._readers.setdefault(job_id, set()).add(reader)
        try:
            yield reader
        finally:
            self._readers[job_id].discard(reader)
            if not self._readers[job_id]:
                del self._readers[job_id]

    def is_crowded(self, job_id: str) -> bool:
        """Return whether a job has so many readers that each of its events is a lot of work."""
        return len(self._readers.get(job_id, ())) > CROWD

    def is_read(self, job_id: str) -> bool:
        return job_id in self._readers

    async def _watch(self) -> None:
        """Send readers that have waited too long to the log.

        One task looks at all readers: a timer for each event would cost more than the event.
        """
        while True:
            await asyncio.sleep(self._silence_s / 5)
            for readers in self._readers.values():
                for reader in readers:
                    if reader.is_silent_for(self._silence_s):
                        reader.miss()

    def _miss(self) -> None:
        for readers in self._readers.values():
            for reader in readers:
                reader.miss()

    def _deliver(self, channel: bytes, message: bytes) -> None:
        for line in message.split(b"\n"):
            end = line.find(MIDDLE)
            readers = self._readers.get(line[len(HEAD) : end].decode(errors="replace"))
            if readers:
                self._feed(readers, line[end + len(MIDDLE) : -1])

    def _feed(self, readers: set[Reader], text: bytes) -> None:
        try:
            event = EVENT.validate_json(text if len(text) <= MAX_LIVE_BYTES else b"")
        except ValueError:  # not from our scripts, or too large to parse here: the log has it
            for reader in readers:
                reader.miss()
        else:
            for reader in readers:
                reader.put(event)
