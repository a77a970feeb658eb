"""W3C's traceparent of a span, without loading OpenTelemetry."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def traceparent_of(span: "Span") -> str:
    known = span.get_span_context()
    return f"00-{known.trace_id:032x}-{known.span_id:016x}-{int(known.trace_flags) & 1:02x}"


def current_traceparent() -> str | None:
    """Return the traceparent of the span that this program has open; None where it has none.

    A program that has one has loaded OpenTelemetry, so it is not loaded for this.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span: Span = trace.get_current_span()
    return traceparent_of(span) if span.get_span_context().is_valid else None
