"""The one subscriber connection of a client process, and the readers that it feeds.

A message holds a step's events for every job of one lane: lines of JSON, as the scripts write them,
`{"job_id":"...","event":{...}}`.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from gateway.reader import Reader
from schemas.connection import heeding
from schemas.errors import QueueUnreachable
from schemas.event import EVENT

PING_S = 2.0  # a peer that is silent twice as long is taken for dead
SUBSCRIBE_S = 5.0
RECONNECT_S = 0.2
SILENCE_S = 5.0  # then the log is asked: a lost end message costs no more than this
MAX_UNREAD = 256  # events of one reader; past it the reader pages from the log
HEAD, MIDDLE = b'{"job_id":"', b'","event":'


class Inbox:
    """Keeps channels subscribed through every loss of the connection; readers hear of each loss."""

    def __init__(
        self, redis: Redis, silence_s: float = SILENCE_S, max_unread: int = MAX_UNREAD
    ) -> None:
        self._redis = redis
        self._silence_s = silence_s
        self._max_unread = max_unread
        self._pubsub: PubSub | None = None
        self._confirmed: dict[str, asyncio.Event] = {}
        self._readers: dict[str, set[Reader]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        tasks = [task for task in (self._listening, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def subscribe(self, channel: str) -> None:
        """Return once Redis sends this channel here."""
        if channel not in self._confirmed:
            self._confirmed[channel] = asyncio.Event()
            if self._listening is None:
                self._listening = asyncio.create_task(self._keep_listening())
            elif self._pubsub is not None:
                with contextlib.suppress(RedisError, OSError):  # the listener subscribes it anew
                    await heeding(self._pubsub.subscribe(channel))
        try:
            async with asyncio.timeout(SUBSCRIBE_S):
                await self._confirmed[channel].wait()
        except TimeoutError:
            raise QueueUnreachable("Redis could not be reached: no subscription") from None

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

    async def _keep_listening(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await heeding(pubsub.subscribe(*self._confirmed))
                    self._pubsub = pubsub
                    await self._listen(pubsub)
            except (RedisError, OSError):
                self._lose()
                await asyncio.sleep(RECONNECT_S)

    async def _watch(self) -> None:
        """One clock for all readers: a timer for each event would cost more than the event."""
        while True:
            await asyncio.sleep(self._silence_s / 5)
            for readers in self._readers.values():
                for reader in readers:
                    if reader.is_silent_for(self._silence_s):
                        reader.miss()

    def _lose(self) -> None:
        self._pubsub = None
        for confirmed in self._confirmed.values():
            confirmed.clear()
        self._miss()

    def _miss(self) -> None:
        for readers in self._readers.values():
            for reader in readers:
                reader.miss()

    async def _listen(self, pubsub: PubSub) -> None:
        """Until the peer is gone, or answers nothing, not even a ping."""
        is_asked = False
        while True:
            message = await heeding(pubsub.get_message(timeout=PING_S))
            if message is None:
                if is_asked:
                    raise ConnectionError("no answer to a ping")
                await heeding(pubsub.ping())
            is_asked = message is None
            if message is None:
                continue
            if message["type"] == "message":
                self._deliver(message["data"])
            elif message["type"] == "subscribe":
                self._confirm(message["channel"].decode())

    def _confirm(self, channel: str) -> None:
        if self._confirmed[channel].is_set():  # redis-py lost the connection and made another
            self._miss()
        self._confirmed[channel].set()

    def _deliver(self, message: bytes) -> None:
        for line in message.split(b"\n"):
            end = line.find(MIDDLE)
            readers = self._readers.get(line[len(HEAD) : end].decode(errors="replace"))
            if readers:
                self._feed(readers, line[end + len(MIDDLE) : -1])

    def _feed(self, readers: set[Reader], text: bytes) -> None:
        try:
            event = EVENT.validate_json(text)
        except ValueError:  # not from our scripts; what they wrote is in the log
            for reader in readers:
                reader.miss()
        else:
            for reader in readers:
                reader.put(event)
