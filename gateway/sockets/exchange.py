"""One request over a websocket, which passes all that a POST would pass."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock.gateway.admission.ask import STOP_MESSAGE, Ask, T
from penstock.gateway.admission.door import end_span, new_request_id
from penstock.gateway.admission.forms import submit
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.admission.responses import given_up_if_refused, read_response
from penstock.gateway.auth.access import RequestHead
from penstock.gateway.off_loop import OffLoop
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.responses.answers import ResponseEvents
from penstock.gateway.sockets.commands import ResponseCreate
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import GatewayStopped, PenstockError
from penstock.schemas.event import ErrorBody, Event, Failed
from penstock.schemas.job import Message

log = logging.getLogger(__name__)
Sender = Callable[[JsonObject], Awaitable[None]]  # sends an event


@dataclass(frozen=True, slots=True)
class MessageBody:
    """A `Body` that has arrived."""

    create: ResponseCreate
    tenant: str
    off_loop: OffLoop

    async def read(self, understood: Callable[[JsonObject], T]) -> T:
        fields, num_bytes = self.create.fields, self.create.num_bytes
        return await self.off_loop.run(self.tenant, num_bytes, understood, fields)


class Exchange:
    """A request for a response, and its events.

    form     how it was understood, once it was
    refusal  the error in place of any event, if it came to that

    head    says who asks, as that of a POST
    hangup  is set when the caller has hung up
    """

    def __init__(
        self, gateway: Gateway, head: RequestHead, hangup: asyncio.Event, send_event: Sender
    ) -> None:
        self.form: AnswerContext | None = None
        self.refusal: ErrorBody | None = None
        self._gateway = gateway
        self._head = head
        self._hangup = hangup
        self._send_event = send_event
        self._events: ResponseEvents | None = None
        self._status = 0  # the status that HTTP would have; 0: nothing was answered yet

    async def run(self, create: ResponseCreate, before: Sequence[Message] | None) -> None:
        """Answer the request. `before` is what was said, where the connection alone knows it."""
        door, began_ns = self._gateway.door, time.time_ns()
        ask: Ask | None = None
        try:
            ask = await door.ask(self._head, began_ns)
            await door.turns.turn(ask.caller.tenant)
            await self._answer(ask, create, before)
        except PenstockError as error:
            await self._fail(error)
        except asyncio.CancelledError:  # the time to drain is up
            if self._status:
                raise
            await self._fail(GatewayStopped(STOP_MESSAGE))
        except Exception:
            log.exception("a request over a websocket failed")
            if not self._status:
                await self._fail(PenstockError("the gateway failed; its log says why"))
        finally:
            if ask and ask.span:
                head, request_id = self._head, new_request_id()
                end_span(ask.span, head.method, head.path, self._status, request_id)

    async def _answer(
        self, ask: Ask, create: ResponseCreate, before: Sequence[Message] | None
    ) -> None:
        gateway = self._gateway
        body = MessageBody(create, ask.caller.tenant, gateway.client.off_loop)
        form, noted_in = await read_response(gateway, ask, body, before)
        self.form = form
        async with given_up_if_refused(gateway, form, noted_in):
            form, stream = await submit(gateway, ask, form)
        self._events = ResponseEvents(form)

        async def send_all() -> None:
            async for batch in stream.events:
                for event in batch:
                    await self._take(event)
                await asyncio.sleep(0)  # a socket with room does not let other tasks run

        await stream.attend(send_all, self._hangup.wait, self._fail)

    async def _take(self, event: Event) -> None:
        """Send what the event brings. A job that fails before any token is refused."""
        if self._status == 0 and isinstance(event, Failed):
            self._refuse(event.error)
            return
        if self._status == 0:
            self._begin(200)
        assert self._events is not None
        for step in self._events.steps(event):
            await self._send_event(step)

    async def _fail(self, error: PenstockError) -> None:
        """End with an error of the gateway itself."""
        if self._status == 0:
            self._refuse(error.body())
        else:
            await self._take(Failed(position=0, state="failed", error=error.body()))

    def _refuse(self, error: ErrorBody) -> None:
        self._begin(error.status)
        self.refusal = error

    def _begin(self, status: int) -> None:
        self._status = status
        self._gateway.metrics.responses.labels(str(status)).inc()
