"""Responses that follow a job: as server-sent events (SSE), or as one answer at the job's end.

No status is sent before the job's first event, so a job that fails at once becomes a plain error
response, for a stream as well. A caller who hangs up is noticed at any moment.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.admission.ask import Answering, stop
from penstock.gateway.http.errors import error_response, response_to
from penstock.schemas.cursor import Had
from penstock.schemas.errors import PenstockError
from penstock.schemas.event import Delta, Done, Event, Failed

MAX_SEND_BYTES = 1 << 16  # about what a socket takes: more would only wait in memory
# An SSE comment without an empty line after it. That line would end an event that has no data: at
# this, clients that follow the standard to the letter forget the last id, and OpenAI's Python
# client fails.
PING = b": ping\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx holds a stream back otherwise
]


class Writer(Protocol):
    """Renders the events of one stream.

    `last_id` is the id of the last event that the reader had before, as it says itself.
    """

    @property
    def last_id(self) -> str: ...

    def render(self, event: Event) -> bytes:
        """Return the event as bytes, empty where there is nothing to show."""

    def render_error(self, error: Failed) -> bytes:
        """Return an error of the gateway itself, without an id: it is no event of the job."""


class Listened(Response):
    """A response that ends early when the caller hangs up, or its key is revoked or expires."""

    def __init__(self, stream: Answering) -> None:
        super().__init__()
        self.stream = stream
        self.has_begun = False  # a status was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def hung_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await self.stream.attend(
            lambda: self.answer(scope, receive, send),
            hung_up,
            lambda error: self.cut(scope, receive, send, error),
        )

    async def cut(self, scope: Scope, receive: Receive, send: Send, error: PenstockError) -> None:
        """End with an error, in place of what was not sent yet."""
        if not self.has_begun:
            await response_to(error, scope["path"])(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(Listened):
    """One answer at the job's end, as `respond` makes it of the deltas and the end."""

    def __init__(
        self,
        stream: Answering,
        respond: Callable[[list[Delta], Done | Failed], Awaitable[Response]],
    ) -> None:
        super().__init__(stream)
        self._respond = respond

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[Delta] = []
        response = Response()
        async for batch in self.stream.events:
            for event in batch:
                if isinstance(event, Delta):
                    deltas.append(event)
                else:
                    response = await self._respond(deltas, event)
        self.has_begun = True
        await response(scope, receive, send)


class EventStream(Listened):
    """Server-sent events, sent as they are written. Events that wait together are sent together.

    Nothing is read ahead of what is sent: a caller who does not read fills the socket, and then
    the job's reader, which drops what waits and goes on from the log at the caller's speed.
    An error of the gateway itself has the id of the last event before it, so a caller who comes
    back with that id misses nothing and gets nothing twice.
    """

    def __init__(self, stream: Answering, writer: Writer, ping_s: float) -> None:
        super().__init__(stream)
        self._writer = writer
        self._ping_s = ping_s
        self._last: Event | None = None  # the last that was sent
        self._is_sending = False

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await anext(self.stream.events)
        if isinstance(first[0], Failed):
            self.has_begun = True
            return await error_response(first[0].error, path=scope["path"])(scope, receive, send)
        return await self.relay(send, first)

    async def relay(self, send: Send, first: list[Event]) -> None:
        """Send the status, and then every event as it comes."""
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        ping_task = asyncio.create_task(self._ping(send))
        try:
            await self._send(send, first)
            async for batch in self.stream.events:
                await self._send(send, batch)
        except PenstockError as error:  # the status was sent: the stream must tell the error
            await self._send_bytes(send, self._own(error))
        finally:
            await stop(ping_task)
        await send({"type": "http.response.body", "body": b""})

    async def cut(self, scope: Scope, receive: Receive, send: Send, error: PenstockError) -> None:
        if self.has_begun:
            await self._send_bytes(send, self._own(error))
            await send({"type": "http.response.body", "body": b""})
        await super().cut(scope, receive, send, error)

    async def _send(self, send: Send, batch: list[Event]) -> None:
        """Send a batch, and return once the socket has room for more."""
        pieces, num_bytes, last = list[bytes](), 0, self._last
        for event in batch:
            if not (piece := self._writer.render(event)):
                continue
            pieces.append(piece)
            num_bytes, last = num_bytes + len(piece), event
            if num_bytes >= MAX_SEND_BYTES:
                await self._send_bytes(send, b"".join(pieces))
                pieces, num_bytes, self._last = [], 0, last
        if num_bytes:
            await self._send_bytes(send, b"".join(pieces))
            self._last = last

    def _own(self, error: PenstockError) -> bytes:
        last_id = self._last.id if self._last else self._writer.last_id
        progress = Had.parse(last_id.partition(".")[0] or "0", "id")
        event = Failed(position=progress.position, state="failed", error=error.body())
        id_line = f"id: {last_id}\n".encode() if last_id else b""
        return id_line + self._writer.render_error(event)

    async def _send_bytes(self, send: Send, body: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._is_sending = False
        if len(body) >= MAX_SEND_BYTES:
            await asyncio.sleep(0)  # a send to a socket with room does not let other tasks run

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if not self._is_sending:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


class OpenedStream(EventStream):
    """A stream of a job that is known to exist: the status goes out before any event."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.relay(send, [])
