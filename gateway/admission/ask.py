"""A request and its answer, whatever transport they come and go by."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.gateway.auth.access import Caller
from penstock.gateway.queue_client import EventBatches
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import PenstockError, Unauthorized

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Span

T = TypeVar("T")
STOP_MESSAGE = "the gateway ended before it could answer; ask again"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that was let in, but for its body.

    idempotency_key  under which it may be repeated; None: it makes a job of its own
    span             in which it goes on, where there are traces
    headers          what its answer is to tell besides, by HTTP's names
    began_s          when it came, by the monotonic clock
    """

    caller: Caller
    idempotency_key: str | None = None
    span: "Span | None" = None
    headers: dict[str, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)


class Body(Protocol):
    async def read(self, understood: Callable[[JsonObject], T]) -> T:
        """Return what `understood` makes of the fields, once.

        A null field at the top counts as absent. Where a name is given twice the last value counts,
        for everything that reads the body.
        """


async def stay() -> None:
    """Do nothing when a caller leaves: the job is another's, or its reader comes back."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A job as it is followed for one request.

    leave      is called when the caller hangs up, or its key ends
    room       counts it while it is followed; it may refuse to
    created_s  of the job, in unix seconds, where the request submitted it
    """

    job_id: str
    events: EventBatches
    caller: Caller
    leave: Callable[[], Awaitable[None]] = stay
    room: Callable[[], AbstractContextManager[None]] = nullcontext
    created_s: int = 0

    async def attend(
        self,
        answer: Callable[[], Awaitable[None]],
        hung_up: Callable[[], Coroutine[None, None, object]],
        cut: Callable[[PenstockError], Awaitable[None]],
    ) -> None:
        """Run `answer` to its end, or until `hung_up` returns or the caller's key ends: then leave.

        `cut` is to tell why where a key ended. When the gateway stops and cancels this, the job
        stays for a caller who comes back. Raises what `answer` raises, and what `room` does.
        """

        async def answer_and_close() -> None:
            async with aclosing(self.events):
                await answer()

        key_end = self.caller.key_end or asyncio.Event()
        with self.room():
            answer_task = asyncio.create_task(answer_and_close())
            hangup_task = asyncio.create_task(hung_up())
            end_task = asyncio.create_task(key_end.wait())
            try:
                await asyncio.wait(
                    {answer_task, hangup_task, end_task}, return_when="FIRST_COMPLETED"
                )
                is_answered = answer_task.done()
            finally:
                await stop(answer_task, hangup_task, end_task)
            if is_answered:
                return answer_task.result()
            if not end_task.cancelled():
                await cut(Unauthorized("the API key has expired, or was revoked"))
            return await self.leave()


async def stop(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
