"""Lets requests in: it finds who asks, in a span of the request's own, tenants in turn."""

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.gateway.admission.ask import Ask
from penstock.gateway.auth.access import Access, RequestHead
from penstock.schemas.process.loop_turns import LoopTurns
from penstock.schemas.process.trace_context import traceparent_of

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Span, Tracing

UNTRACED_PATHS = ("/health", "/metrics", "/v1/status", "/page")  # asked again and again


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Door:
    """The way in of all requests. Whoever was let in awaits its turn before it goes on."""

    access: Access
    tracing: "Tracing | None" = None
    # Many requests of one tenant hold up no other's.
    turns: LoopTurns = field(default_factory=lambda: LoopTurns(rest_s=0.0))

    async def ask(
        self, head: RequestHead, began_ns: int, idempotency_key: str | None = None
    ) -> Ask:
        """Return the request as its caller's.

        Raises Unauthorized, OutOfScope, ForeignHost, ForeignPage, QueueUnreachable.
        """
        caller = await self.access.caller(head)
        if self.tracing is None or head.path.startswith(UNTRACED_PATHS):
            return Ask(caller, idempotency_key)
        from penstock.schemas.process.spans import SpanKind

        span = self.tracing.start(
            f"{head.method} {head.path}",
            caller.traceparent,
            kind=SpanKind.SERVER,
            start_ns=began_ns,
        )
        return Ask(replace(caller, traceparent=traceparent_of(span)), idempotency_key, span)


def end_span(span: "Span", method: str, route: str, status: int, request_id: str) -> None:
    """End a request's span. The status is 0 where nothing was answered."""
    from penstock.schemas.process.spans import failed

    span.update_name(f"{method} {route}".strip())
    span.set_attributes(
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "penstock.request.id": request_id,
        }
    )
    if status >= 500 or not status:
        failed(span, str(status or "hung up"))
    span.end()
