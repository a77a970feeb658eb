"""The client for code without an event loop. It runs a client on a loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.job import DEFAULT_TENANT

P = ParamSpec("P")
R = TypeVar("R")


def _waits(
    method: Callable[Concatenate[QueueClient, P], Coroutine[None, None, R]],
) -> Callable[Concatenate["SyncClient", P], R]:
    @wraps(method)
    def call(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._wait(method(self._client, *args, **kwargs))

    return call


def _iterates(
    method: Callable[Concatenate[QueueClient, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate["SyncClient", P], Iterator[R]]:
    @wraps(method)
    def call(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        events = method(self._client, *args, **kwargs)
        try:
            while True:
                try:
                    yield self._wait(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(events.aclose())

    return call


class SyncClient:
    """A `Client` whose methods block until their result is there. Threads may share it."""

    def __init__(self, url: str, tenant: str = DEFAULT_TENANT) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = QueueClient.from_url(url, tenant)

    @classmethod
    def from_url(cls, url: str, tenant: str = DEFAULT_TENANT) -> Self:
        """Make a client, as the class itself does."""
        return cls(url, tenant)

    enqueue = _waits(QueueClient.enqueue)
    stream = _iterates(QueueClient.stream)
    result = _waits(QueueClient.result)
    cancel = _waits(QueueClient.cancel)
    status = _waits(QueueClient.status)
    recent = _waits(QueueClient.recent)
    delete = _waits(QueueClient.delete)
    models = _waits(QueueClient.models)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[None, None, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(events: AsyncGenerator[R, None]) -> R:
    return await anext(events)
