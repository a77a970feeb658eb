"""The middleware that every HTTP request passes: it gets an id, and is let in or refused."""

import asyncio
import re
import secrets

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.access import Access, Caller
from penstock.gateway.http.errors import response_to
from penstock.gateway.http.metrics import Metrics
from penstock.schemas.errors import GatewayStopped, PenstockError

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CALLER = "penstock.caller"
MORE_HEADERS = "penstock.headers"  # put on the response, even if it is an error


class Middleware:
    """Gives each request an id, finds its caller, and counts the responses.

    It is plain ASGI, because a wrapped response would cost time on every token of every stream.
    """

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given, is_begun = headers.get("x-request-id", ""), False
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                shown = MutableHeaders(scope=message)
                shown["x-request-id"] = request_id
                shown.update(scope.get(MORE_HEADERS, {}))
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        app = self._app
        try:
            try:
                scope[CALLER] = await self._access.caller(scope, headers)
            except PenstockError as refusal:
                app = response_to(refusal)
            await app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time to drain is up
            if is_begun:
                raise
            stopped = GatewayStopped("the gateway ended before it could answer; ask again")
            await response_to(stopped)(scope, receive, send_with_id)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[CALLER]
    return caller


def tenant_of(request: Request) -> str:
    """Return the tenant that the caller's jobs belong to."""
    return caller_of(request).tenant
