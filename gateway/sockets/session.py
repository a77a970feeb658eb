"""Responses over one websocket, as OpenAI has them: each message is a request of its own."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fastapi import WebSocket, WebSocketDisconnect
from pydantic_core import to_json

from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.access import RequestHead
from penstock.gateway.openai.responses import error
from penstock.gateway.responses.answers import as_called
from penstock.gateway.responses.stored import going_on
from penstock.gateway.sockets.commands import ResponseCreate, read_command
from penstock.gateway.sockets.exchange import Exchange
from penstock.gateway.sockets.turns import LocalResponses
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import GatewayStopped, InvalidJob, PenstockError, Unavailable
from penstock.schemas.event import ErrorBody
from penstock.schemas.job import Job, Message

ENDING = "penstock.ending"  # in a websocket's scope: the event that the gateway ends
MAX_ACTIVE = 16  # responses of one connection that are made at once
MAX_WAITING = 256  # responses that wait for them
MAX_LANES = 32  # with a name, in the life of a connection
GOES_AWAY = 1012  # the code of a server that starts again
_FAILURE = 1011  # the code of a server that failed
_ANSWERS = ("response.completed", "response.incomplete")
_ENDS = (*_ANSWERS, "response.failed")
_SHOWN_OF_NOTHING = ("response.created", "response.in_progress", "response.failed")


class TooManyLanes(InvalidJob):
    code = "websocket_stream_limit_reached"


class TooManyWait(Unavailable):
    code, status = "too_many_waiting", 429


class ResponsesSocket:
    """One connection. What is asked on a lane is answered in turn, and lanes beside each other.

    When the gateway ends, what was asked is answered, and then the socket is closed.
    """

    def __init__(self, websocket: WebSocket, tenant: str) -> None:
        scope = websocket.scope
        self._websocket = websocket
        self._head = RequestHead("POST", scope["path"], scope["query_string"], websocket.headers)
        self._off_loop = self._gateway.client.off_loop
        self._tenant = tenant
        self._ending: asyncio.Event = scope[ENDING]
        self._hangup = asyncio.Event()
        self._most_bytes = self._gateway.settings.max_body_bytes
        self._turns = LocalResponses(self._most_bytes)
        self._lanes: dict[str, asyncio.Task[None]] = {}  # the last that was asked on each
        self._slots = asyncio.Semaphore(MAX_ACTIVE)
        self._num_open = self._open_bytes = 0  # asked, and not answered
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def _gateway(self) -> Gateway:
        """The gateway with the settings that are in force now."""
        gateway: Gateway = self._websocket.app.state.gateway
        return gateway

    async def serve(self) -> None:
        """Answer until the caller leaves or the gateway ends."""
        async with asyncio.TaskGroup() as parts:
            end = parts.create_task(self._end_with_gateway())
            while (raw := await self._received()) is not None:
                await self._take(raw, parts)
            self._hangup.set()  # a gateway that is cancelled leaves its jobs to whoever comes back
            end.cancel()

    async def _received(self) -> bytes | None:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        return message["bytes"] if text is None else text.encode()

    async def _end_with_gateway(self) -> None:
        await self._ending.wait()
        await self._is_idle.wait()
        with suppress(WebSocketDisconnect, RuntimeError):  # the caller was sooner
            await self._websocket.close(GOES_AWAY)

    async def _take(self, raw: bytes, parts: asyncio.TaskGroup) -> None:
        stream_id = ""
        try:
            create = await self._off_loop.run(self._tenant, len(raw), read_command, raw)
            stream_id = create.stream_id
            if self._ending.is_set():
                raise GatewayStopped("the gateway ends; ask again over another connection")
            lanes = {*self._lanes, stream_id} - {""}
            if len(lanes) > MAX_LANES:
                sentence = f"a connection has at most {MAX_LANES} names; open another"
                raise TooManyLanes(f"stream_id: {sentence}", "stream_id")
            if self._num_open >= MAX_ACTIVE + MAX_WAITING or self._open_bytes > self._most_bytes:
                sentence = (
                    f"{self._num_open} requests are open on this connection; await their ends"
                )
                raise TooManyWait(sentence)
        except PenstockError as refusal:
            await self._send_error(refusal.body(), stream_id)
            return
        self._num_open += 1
        self._open_bytes += create.num_bytes
        self._is_idle.clear()
        before = self._lanes.get(stream_id)
        self._lanes[stream_id] = parts.create_task(self._in_turn(create, before))

    async def _in_turn(self, create: ResponseCreate, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            async with self._slots:
                if not self._hangup.is_set():
                    await self._respond(create)
        finally:
            self._num_open -= 1
            self._open_bytes -= create.num_bytes
            if not self._num_open:
                self._is_idle.set()

    async def _respond(self, create: ResponseCreate) -> None:
        before, num_bytes = self._turns.find(create.previous)
        has_ended = False

        async def send_event(event: JsonObject) -> None:
            nonlocal has_ended
            kind = event["type"]
            has_ended = has_ended or kind in _ENDS
            if not create.generates and kind not in (*_ANSWERS, *_SHOWN_OF_NOTHING):
                return
            if kind in _ANSWERS and not create.is_stored:
                assert exchange.form is not None
                await self._keep(create, exchange.form.job, before, num_bytes, event)
            await self._send(event, create.stream_id)

        exchange = Exchange(self._gateway, self._head, self._hangup, send_event)
        await exchange.run(create, before)
        if exchange.refusal is not None:
            self._turns.drop(create.stream_id, create.previous)
            await self._send_error(exchange.refusal, create.stream_id)
        elif not (has_ended or self._hangup.is_set()):
            await self._websocket.close(_FAILURE)

    async def _keep(
        self,
        create: ResponseCreate,
        job: Job,
        before: Sequence[Message] | None,
        num_bytes: int,
        event: JsonObject,
    ) -> None:
        """Keep a response that is not stored. Its last event loses an answer that none asked for.

        num_bytes  about how many `before` has, that it goes on with
        """
        response = event["response"]
        assert isinstance(response, dict)
        if not create.generates:
            _leave_answer_out(event, response)
        num_bytes += create.num_bytes + len(to_json(event))
        messages = before or []
        if create.has_input:
            messages = await self._off_loop.run(
                self._tenant, num_bytes, going_on, job, response["output"]
            )
        self._turns.keep(create.stream_id, f"{response['id']}", messages, num_bytes)

    async def _send_error(self, body: ErrorBody, stream_id: str) -> None:
        failure: JsonObject = {"type": "error", "status": body.status, **error(as_called(body))}
        await self._send(failure, stream_id)

    async def _send(self, event: JsonObject, stream_id: str) -> None:
        """Send an event under its lane's name; nobody may be there."""
        if self._hangup.is_set():
            return
        if stream_id:
            event = {"stream_id": stream_id, **event}
        try:
            await self._websocket.send_text(to_json(event).decode())
        except (WebSocketDisconnect, RuntimeError):
            self._hangup.set()


def _leave_answer_out(event: JsonObject, response: JsonObject) -> None:
    response |= {"status": "completed", "incomplete_details": None, "output": []}
    usage = response["usage"]
    assert isinstance(usage, dict)
    usage |= {"output_tokens": 0, "total_tokens": usage["input_tokens"]}
    event |= {"type": "response.completed", "sequence_number": 2}
