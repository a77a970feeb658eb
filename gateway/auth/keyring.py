"""The API keys in Redis, and a gateway's memory of them."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakValueDictionary

from pydantic import ValidationError

from penstock.gateway.auth.api_key import API_KEYS, KEY, SECRET_MARK, ApiKey, is_right
from penstock.gateway.tasks.due import server_time_ms
from penstock.schemas.errors import NotServed, QueueUnreachable
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis

REFRESH_S = 1.0  # a revoked key is refused after this time at the latest
PATIENCE_S = 1.0  # how long a request waits for Redis before the keys in memory are used
MEMORY_S = 60.0  # how long keys are taken from memory while Redis is away

log = logging.getLogger(__name__)


class NewerKey(NotServed):
    """Raised for a key's record that a newer version wrote."""

    def __init__(self) -> None:
        super().__init__("the record of a key was written by a newer version; upgrade this one")


class KeyStore:
    """Stores all API keys ever made, in Redis.

    Revoked keys stay, so that revoking the last one does not let everybody in.
    """

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def add(self, key: ApiKey) -> ApiKey:
        """Store a new key, and return its record; one that is there stays as it is.

        Raises NewerKey.
        """
        await self._connection.call("HSETNX", API_KEYS, key.key_id, key.dump())
        text = await self._connection.call("HGET", API_KEYS, key.key_id)
        assert isinstance(text, bytes)
        return _read(text)

    async def change(self, key_id: str, edit: Callable[[ApiKey], ApiKey]) -> ApiKey | None:
        """Replace a key's record by what `edit` makes of it, and return that; None: no such key.

        Raises NewerKey.
        """
        while True:
            text = await self._connection.call("HGET", API_KEYS, key_id)
            if not isinstance(text, bytes):
                return None
            key = edit(_read(text))
            args = API_KEYS, key_id, text, key.dump()
            if (await self._connection.run("keys/replace", *args))[0] == b"ok":
                return key

    async def has_ended(self, key_id: str) -> bool:
        """Return whether a key is known, and revoked or expired. Raises NewerKey."""
        text = await self._connection.call("HGET", API_KEYS, key_id)
        return isinstance(text, bytes) and _read(text).has_ended(await self.time_s())

    async def ended(self) -> list[ApiKey]:
        """Return the keys that are revoked or expired, but for those that a newer version wrote."""
        keys, now_s = list[ApiKey](), await self.time_s()
        for text in await self.texts():
            with suppress(NewerKey):
                keys.append(_read(text))
        return [key for key in keys if key.has_ended(now_s)]

    async def time_s(self) -> int:
        """Return the time by which keys expire, in Unix seconds of Redis's clock."""
        return await server_time_ms(self._connection) // 1000

    async def mark(self) -> str | None:
        """Return the mark of the server secret that keys are checked with.

        None means that no gateway has a secret yet.
        """
        mark = await self._connection.call("GET", SECRET_MARK)
        return mark.decode() if isinstance(mark, bytes) else None

    async def note_mark(self, mark: str) -> None:
        await self._connection.call("SET", SECRET_MARK, mark)

    async def texts(self) -> list[bytes]:
        return texts_of(await self._connection.call("HVALS", API_KEYS))

    async def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first. Raises NewerKey."""
        keys = [_read(text) for text in await self.texts()]
        return sorted(keys, key=lambda key: (key.created_s, key.key_id))


class Keyring:
    """Finds the record of a key. It asks Redis at most once a second, for all requests."""

    def __init__(self, redis: Redis, secret: bytes | None) -> None:
        self._store = KeyStore(redis)
        self._secret = secret or b""
        self._first_s = max(PATIENCE_S, redis.place.retry_s)  # for keys that never came yet
        self._records: dict[bytes, ApiKey | None] = {}
        self._keys: dict[str, ApiKey] = {}
        self._fresh_until_s = 0.0
        self._known_until_s = 0.0
        self._ahead_s = 0.0  # how far Redis's clock is ahead of the monotonic one
        self._refresh_task: asyncio.Task[None] | None = None
        self._ends = WeakValueDictionary[str, asyncio.Event]()
        self._watch_task: asyncio.Task[None] | None = None
        self.has_keys = False  # stays true, so that an emptied Redis does not let everybody in

    async def find(self, text: str) -> ApiKey | None:
        """Return the record of a key, or None if the key is wrong, expired or revoked."""
        match = KEY.fullmatch(text)
        record = self._keys.get(match[1]) if match else None
        if not is_right(self._secret, text, record) or not self._secret:
            return None
        assert record is not None
        return None if record.has_ended(self._now_s()) else record

    def end(self, key_id: str) -> asyncio.Event:
        """Return what is set once the key is revoked or expires, as long as somebody holds it."""
        event = self._ends.setdefault(key_id, asyncio.Event())
        if self._watch_task is None or self._watch_task.done():
            self._watch_task = asyncio.create_task(self._watch())
        return event

    def _now_s(self) -> float:
        """Return the time by Redis's clock, also while Redis is away."""
        return time.monotonic() + self._ahead_s

    async def _watch(self) -> None:
        """Load the keys again and again while requests by them are open."""
        while self._ends:
            await asyncio.sleep(REFRESH_S)
            with suppress(QueueUnreachable):
                await self.refresh()
            self._set_ends()

    def _set_ends(self) -> None:
        now_s = self._now_s()
        for key_id, event in self._ends.items():
            if key_id in self._keys and self._keys[key_id].has_ended(now_s):
                event.set()

    async def refresh(self) -> None:
        """Load the keys again if they are older than `REFRESH_S`.

        Raises QueueUnreachable when Redis is away and the keys in memory are too old or never came.
        """
        if time.monotonic() >= self._fresh_until_s:
            if self._refresh_task is None or self._refresh_task.done():
                self._refresh_task = asyncio.create_task(self._ask())
            patience_s = PATIENCE_S if self._known_until_s else self._first_s
            await asyncio.wait({self._refresh_task}, timeout=patience_s)
        is_old = self.has_keys and time.monotonic() >= self._known_until_s
        if is_old or self._known_until_s == 0:
            raise QueueUnreachable("API keys cannot be checked: Redis could not be reached")

    async def _ask(self) -> None:
        try:
            texts, now_s = await asyncio.gather(self._store.texts(), self._store.time_s())
        except QueueUnreachable as failure:
            log.warning("API keys are taken from memory: %s", failure.message)
            self._fresh_until_s = time.monotonic() + REFRESH_S
            return
        self._records = {
            text: self._records[text] if text in self._records else _parsed(text) for text in texts
        }
        self._keys = {key.key_id: key for key in self._records.values() if key is not None}
        self.has_keys = self.has_keys or bool(texts)
        own_s = time.monotonic()
        self._ahead_s = now_s - own_s
        self._fresh_until_s, self._known_until_s = own_s + REFRESH_S, own_s + MEMORY_S
        if self.has_keys and not self._secret:
            log.error("API keys exist, but no server secret: nobody is let in by one")


def _read(text: bytes) -> ApiKey:
    try:
        return ApiKey.model_validate_json(text)
    except ValidationError:
        raise NewerKey from None


def _parsed(text: bytes) -> ApiKey | None:
    try:
        return ApiKey.model_validate_json(text)
    except ValidationError:
        log.error("an API key's record cannot be read by this version: it admits nobody")
        return None
