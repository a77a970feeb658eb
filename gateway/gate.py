"""What every HTTP request passes first: its id, the key it needs, the tenant behind it."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import error_response
from gateway.intake import Caller
from gateway.metrics import Metrics
from schemas.errors import Unauthorized
from schemas.job import DEFAULT_TENANT

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Gate:
    """Plain ASGI, because a wrapped response costs every token of every stream."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        app = self._app
        if scope["path"] not in OPEN_PATHS and not self._admits(headers):
            app = error_response(Unauthorized("give a valid API key as a bearer token").body())
        return await app(scope, receive, send_with_id)

    def _admits(self, headers: Headers) -> bool:
        """Every key is compared, in constant time, so the answer's time tells nothing."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return not self._digests or (any(matches) and scheme.lower() == "bearer")


def tenant_of(request: Request) -> str:
    """Whose jobs these are. Keys carry no tenant: all callers are one."""
    return DEFAULT_TENANT


def caller_of(request: Request) -> Caller:
    traceparent = request.headers.get("traceparent", "")
    traced = TRACEPARENT.fullmatch(traceparent) is not None
    return Caller(tenant_of(request), traceparent if traced else None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
