"""W3C's traceparent of a span, without loading OpenTelemetry."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def traceparent_of(span: "Span") -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"


def log_fields(job_id: str, traceparent: str | None) -> dict[str, str]:
    """Return what a log record of a job is given as `extra`."""
    return {"job": job_id} | ({"trace_id": traceparent[3:35]} if traceparent else {})


def sampled_trace(traceparent: str | None) -> str | None:
    """Return the trace that a traceparent names, if somebody records it."""
    is_sampled = traceparent is not None and int(traceparent[-2:], 16) & 1
    return traceparent[3:35] if traceparent and is_sampled else None


def current_traceparent() -> str | None:
    """Return the traceparent of the span that this program has open; None where it has none.

    A program that has one has loaded OpenTelemetry, so it is not loaded for this.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span: Span = trace.get_current_span()
    return traceparent_of(span) if span.get_span_context().is_valid else None
