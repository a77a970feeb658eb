"""Answers that follow a job while the caller listens: as a stream of events, or whole at its end.

No status is sent before the job's first event, so a job that fails at once becomes a plain error
response, for a stream as well. A caller who hangs up is noticed at any moment.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import error_response
from schemas.errors import PenstockError
from schemas.event import Delta, Done, Event, Failed

Events = AsyncGenerator[Event, None]

MAX_UNSENT = 64  # events; then the job is read at the caller's speed
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx holds a stream back otherwise
]


class Listened(Response):
    """A response whose making ends when the caller hangs up.

    Cancelled from outside, because the gateway stops, it leaves the job to whoever comes back.
    """

    def __init__(self, events: Events, hung_up: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.events = events
        self._hung_up = hung_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(scope, receive, send))
        listening = asyncio.create_task(_until_hung_up(receive))
        try:
            await asyncio.wait({answer, listening}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            await _stop(answer, listening)
        return await self._hung_up()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            await self.answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(Listened):
    """Everything at once, as `shape` makes it of the deltas and the end."""

    def __init__(
        self,
        events: Events,
        hung_up: Callable[[], Awaitable[None]],
        shape: Callable[[list[Delta], Done], bytes],
    ) -> None:
        super().__init__(events, hung_up)
        self._shape = shape

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[Delta] = []
        response = Response()
        async for event in self.events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif isinstance(event, Failed):
                response = error_response(event.error)
            else:
                response = Response(self._shape(deltas, event), media_type="application/json")
        await response(scope, receive, send)


class EventStream(Listened):
    """Server-sent events as `render` writes them. What waits together is sent together."""

    def __init__(
        self,
        events: Events,
        hung_up: Callable[[], Awaitable[None]],
        render: Callable[[Event], bytes],
        ping_s: float,
    ) -> None:
        super().__init__(events, hung_up)
        self._render = render
        self._ping_s = ping_s
        self._unsent: list[bytes] = []
        self._is_read = False
        self._some = asyncio.Event()  # something is unsent, or nothing more will come
        self._room = asyncio.Event()  # little enough is unsent to read on

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await anext(self.events)
        if isinstance(first, Failed):
            return await error_response(first.error)(scope, receive, send)
        return await self.relay(send, first)

    async def relay(self, send: Send, first: Event | None) -> None:
        """Send the status and then every event, as they come."""
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        sending = asyncio.create_task(self._send_all(send))
        pinging = asyncio.create_task(self._ping())
        try:
            await self._read(first)
            await sending
        finally:
            await _stop(sending, pinging)

    async def _read(self, first: Event | None) -> None:
        position = 0
        if first is not None:
            self._put(self._render(first))
        try:
            async for event in self.events:
                position = event.position
                self._put(self._render(event))
                if len(self._unsent) >= MAX_UNSENT:
                    self._room.clear()
                    await self._room.wait()
        except PenstockError as error:  # the status is out: the stream itself must say it
            failed = Failed(position=position, state="failed", error=error.body())
            self._put(self._render(failed))
        self._is_read = True
        self._some.set()

    def _put(self, piece: bytes) -> None:
        self._unsent.append(piece)
        self._some.set()

    async def _send_all(self, send: Send) -> None:
        more = True
        while more:
            await self._some.wait()
            self._some.clear()
            body, self._unsent = b"".join(self._unsent), []
            more = not self._is_read
            self._room.set()
            if body or not more:
                await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._ping_s)
            if not self._unsent:
                self._put(PING)


class OpenedStream(EventStream):
    """A stream of a job that is known to exist: the status goes out before any event."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.relay(send, None)


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
