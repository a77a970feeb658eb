"""The client SDK for backend services: it talks to Redis directly, without HTTP.

    async with Client.from_url("redis://...") as client:
        job_id = await client.enqueue("Why is the sky blue?", model="tiny", max_tokens=64)
        async for event in client.stream(job_id):
            ...

docs/sdk.md lists its methods. A job belongs to a tenant, and no other tenant finds it.
"""

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.job import DEFAULT_TENANT
from penstock.schemas.redis.group_sync import Durability

P = ParamSpec("P")
R = TypeVar("R")


def _calls(
    method: Callable[Concatenate[QueueClient, P], R],
) -> Callable[Concatenate["Client", P], R]:
    @wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._client, *args, **kwargs)

    return call


class Client:
    """Submits jobs, reads their answers and cancels them.

    A process needs one client; any number of tasks may share it.
    """

    def __init__(
        self,
        url: str,
        tenant: str = DEFAULT_TENANT,
        max_queued: int = 10_000,
        durability: Durability = "server",
        max_queued_tokens: int | None = None,
    ) -> None:
        """Make a client of the queue at a URL of Redis.

        With durability `fsync` all that it returns is on the server's disk, with `replicas` on that
        of a replica too.
        """
        self._client = QueueClient.from_url(url, tenant, max_queued, durability, max_queued_tokens)

    @classmethod
    def from_url(
        cls,
        url: str,
        tenant: str = DEFAULT_TENANT,
        max_queued: int = 10_000,
        durability: Durability = "server",
        max_queued_tokens: int | None = None,
    ) -> Self:
        """Make a client, as the class itself does."""
        return cls(url, tenant, max_queued, durability, max_queued_tokens)

    enqueue = _calls(QueueClient.enqueue)
    stream = _calls(QueueClient.stream)
    result = _calls(QueueClient.result)
    cancel = _calls(QueueClient.cancel)
    status = _calls(QueueClient.status)
    recent = _calls(QueueClient.recent)
    delete = _calls(QueueClient.delete)
    models = _calls(QueueClient.models)
    aclose = _calls(QueueClient.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
