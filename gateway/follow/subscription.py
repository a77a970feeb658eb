"""The one subscriber connection of a client process, and the readers that it feeds.

A message holds a step's events for every job of one lane: lines of JSON, as the scripts write them,
`{"job_id":"...","event":{...}}`.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from penstock.gateway.follow.reader import Reader
from penstock.schemas.event import EVENT
from penstock.schemas.redis.servers import Redis
from penstock.schemas.redis.subscriber import Subscriber

SILENCE_S = 5.0  # then the log is asked: a lost end message costs no more than this
MAX_LIVE_BYTES = 16 * 1024  # of one event, which is read in the event loop
MAX_UNREAD = 256  # events of one reader; past it the reader pages from the log
HEAD, MIDDLE = b'{"job_id":"', b'","event":'


class Subscription:
    """Feeds readers with what comes on the channels; they hear of each loss of a connection."""

    def __init__(
        self, redis: Redis, silence_s: float = SILENCE_S, max_unread: int = MAX_UNREAD
    ) -> None:
        self._subscriber = Subscriber(redis, self._deliver, self._miss)
        self._silence_s = silence_s
        self._max_unread = max_unread
        self._readers: dict[str, set[Reader]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._subscriber.aclose()

    async def subscribe(self, channel: str) -> None:
        """Return once Redis sends this channel here."""
        await self._subscriber.subscribe(channel)

    @contextlib.contextmanager
    def reader(self, job_id: str) -> Iterator[Reader]:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        reader = Reader(self._max_unread)
        self._readers.setdefault(job_id, set()).add(reader)
        try:
            yield reader
        finally:
            self._readers[job_id].discard(reader)
            if not self._readers[job_id]:
                del self._readers[job_id]

    def is_read(self, job_id: str) -> bool:
        return job_id in self._readers

    async def _watch(self) -> None:
        """One clock for all readers: a timer for each event would cost more than the event."""
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
        except ValueError:  # not from our scripts, or too large to be read here: the log has it
            for reader in readers:
                reader.miss()
        else:
            for reader in readers:
                reader.put(event)
