"""The middleware that every request passes, and what the routes have of it: who asks.

It gives each request an id, makes its head plain, and lets it in or refuses it.
"""

import asyncio
import re
import time
from typing import Annotated

from fastapi import Depends, Request
from fastapi.requests import HTTPConnection
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.admission.ask import STOP_MESSAGE, Ask
from penstock.gateway.admission.door import Door, end_span, new_request_id
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.access import Caller, RequestHead
from penstock.gateway.http.errors import response_to
from penstock.gateway.metrics.metrics import Metrics
from penstock.schemas.errors import GatewayStopped, PenstockError

ASK = "penstock.ask"  # the request that was let in, in a request's scope
IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Middleware:
    """Gives each request an id, finds its caller, and counts the responses.

    It is plain ASGI, because a wrapped response would cost time on every token of every stream.
    """

    def __init__(self, app: ASGIApp, door: Door, metrics: Metrics) -> None:
        self._app = app
        self._door = door
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._open_socket(scope, receive, send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        header_id, status = headers.get("x-request-id", ""), 0
        request_id = header_id if REQUEST_ID.fullmatch(header_id) else new_request_id()
        ask: Ask | None = None
        began_ns = time.time_ns()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                fields = MutableHeaders(scope=message)
                fields["x-request-id"] = fields["request-id"] = request_id  # OpenAI's, Anthropic's
                fields["openai-processing-ms"] = str((time.time_ns() - began_ns) // 1_000_000)
                fields.update(ask.headers if ask else {})
                self._metrics.responses.labels(str(status)).inc()
            await send(message)

        app = self._app
        try:
            try:
                head = RequestHead(method, path, scope["query_string"], headers)
                ask = await self._door.ask(head, began_ns, headers.get(IDEMPOTENCY_KEY))
                scope[ASK] = ask
                await self._door.turns.turn(ask.caller.tenant)
            except PenstockError as refusal:
                app = response_to(refusal, path)
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time to drain is up
            if status:
                raise
            await response_to(GatewayStopped(STOP_MESSAGE), path)(scope, receive, send_with_id)
        finally:
            if ask and ask.span:
                route = getattr(scope.get("route"), "path", "")
                end_span(ask.span, method, route, status, request_id)

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a websocket in, or refuse it. What is asked over it comes to the door by itself.

        Browsers let a page open one to any host, so the page's origin is checked here.
        """
        headers, app = Headers(scope=scope), self._app
        head = RequestHead("GET", scope["path"], scope["query_string"], headers)
        try:
            self._door.access.pages.check_page(headers)
            scope[ASK] = Ask(await self._door.access.caller(head))
        except PenstockError as refusal:
            app = response_to(refusal, scope["path"])
        await app(scope, receive, send)


class PlainHead:
    """Takes the root path off a path that has it, and answers HEAD with the head of GET's answer.

    A proxy may leave the root path on or take it off: both are served. All that is within, as the
    check of a key's scope, sees one path and one method.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._root_path
        is_asked = scope["type"] != "lifespan"
        if root and is_asked and f"{scope['path']}/".startswith(f"{root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root) or "/"}
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._answer_head(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head alone. `receive` then says that the caller left, which ends a stream."""
        is_sent = False

        async def send_head(message: Message) -> None:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, send_head)


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Open = Annotated[Gateway, Depends(gateway_of)]


def ask_of(request: HTTPConnection) -> Ask:
    ask: Ask = request.scope[ASK]
    return ask


def caller_of(request: HTTPConnection) -> Caller:
    return ask_of(request).caller


def tenant_of(request: HTTPConnection) -> str:
    """Return the tenant that the caller's jobs belong to."""
    return ask_of(request).caller.tenant
