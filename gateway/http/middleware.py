"""The middleware that every HTTP request passes: it gets an id, and is let in or refused."""

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi.requests import HTTPConnection
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.access import Access, Caller
from penstock.gateway.http.errors import response_to
from penstock.gateway.metrics.metrics import Metrics
from penstock.schemas.errors import GatewayStopped, PenstockError
from penstock.schemas.process.loop_turns import LoopTurns
from penstock.schemas.process.trace_context import traceparent_of

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Span, Tracing

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CALLER = "penstock.caller"
MORE_HEADERS = "penstock.headers"
SPAN = "penstock.span"
UNTRACED = ("/health", "/metrics", "/v1/status", "/page")  # asked again and again


def add_headers(scope: Scope, headers: Mapping[str, str]) -> None:
    """Put headers on the response, even if it is an error."""
    scope.setdefault(MORE_HEADERS, {}).update(headers)


class Middleware:
    """Gives each request an id, finds its caller, and counts the responses.

    It is plain ASGI, because a wrapped response would cost time on every token of every stream.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        metrics: Metrics,
        tracing: "Tracing | None",
    ) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._tracing = tracing
        self._turns = LoopTurns(rest_s=0.0)  # many requests of one tenant hold up no other's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._open_socket(scope, receive, send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given, status = headers.get("x-request-id", ""), 0
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        began_ns = time.time_ns()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                shown = MutableHeaders(scope=message)
                shown["x-request-id"] = shown["request-id"] = request_id  # OpenAI's, Anthropic's
                shown["openai-processing-ms"] = str((time.time_ns() - began_ns) // 1_000_000)
                shown.update(scope.get(MORE_HEADERS, {}))
                self._metrics.responses.labels(str(status)).inc()
            await send(message)

        app = self._app
        try:
            try:
                caller = await self._access.caller(scope, headers)
                scope[CALLER] = self._traced(scope, caller, began_ns)
                await self._turns.turn(caller.tenant)
            except PenstockError as refusal:
                app = response_to(refusal, scope["path"])
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time to drain is up
            if status:
                raise
            stopped = GatewayStopped("the gateway ended before it could answer; ask again")
            await response_to(stopped, scope["path"])(scope, receive, send_with_id)
        finally:
            if span := span_of(scope):
                _end(span, scope, status, request_id)

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a websocket in, or refuse it. What is asked over it comes here again, as requests.

        Browsers let a page open one to any host, so the page's origin is checked here.
        """
        headers, app = Headers(scope=scope), self._app
        try:
            self._access.pages.check_page(headers)
            scope[CALLER] = await self._access.caller({**scope, "method": "GET"}, headers)
        except PenstockError as refusal:
            app = response_to(refusal, scope["path"])
        await app(scope, receive, send)

    def _traced(self, scope: Scope, caller: Caller, began_ns: int) -> Caller:
        """Return the caller as the one whose jobs go on in this request's span."""
        if self._tracing is None or scope["path"].startswith(UNTRACED):
            return caller
        from penstock.schemas.process.spans import SpanKind

        name = f"{scope['method']} {scope['path']}"
        span = self._tracing.start(
            name, caller.traceparent, kind=SpanKind.SERVER, start_ns=began_ns
        )
        scope[SPAN] = span
        return replace(caller, traceparent=traceparent_of(span))


def span_of(scope: Scope) -> "Span | None":
    """Return the request's span; None where it has none."""
    return scope.get(SPAN)


def _end(span: "Span", scope: Scope, status: int, request_id: str) -> None:
    from penstock.schemas.process.spans import failed

    route = getattr(scope.get("route"), "path", "")
    span.update_name(f"{scope['method']} {route}".strip())
    span.set_attributes(
        {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": status,
            "penstock.request.id": request_id,
        }
    )
    if status >= 500 or not status:
        failed(span, str(status or "hung up"))
    span.end()


def caller_of(request: HTTPConnection) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def tenant_of(request: HTTPConnection) -> str:
    """Return the tenant that the caller's jobs belong to."""
    return caller_of(request).tenant
