"""Spans of requests and jobs, sent by OTLP over HTTP. `tracing` loads this where it is on.

The context of a span goes from process to process as W3C's traceparent, which lies in the job.
"""

import os
import re
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
SEND_EVERY_MS = "1000"  # what a killed process did not send is missing from its traces
_SCOPE, _UNSET = InstrumentationScope("penstock"), Status()
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Tracing:
    """Makes the spans of one process, and sends them from a thread of its own."""

    def __init__(self, endpoint: str | None, service: str) -> None:
        os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", SEND_EVERY_MS)
        labels = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        resource = _OneResource(Resource.create({**labels, "process.pid": os.getpid()}).attributes)
        self._ids = _Ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._sender = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        self._provider.add_span_processor(self._sender)
        self._tracer = self._provider.get_tracer(_SCOPE.name)

    def start(
        self,
        name: str,
        parent: str | Span | None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        start_ns: int | None = None,
        span_id: int | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Start a span under a span or a traceparent; without one it begins a trace.

        `start_ns` is unix time. `span_id` is given where others can tell the id, to link to it.
        """
        self._ids.next_id = span_id
        return self._tracer.start_span(
            name, _context(parent), kind, attributes, links, start_time=start_ns
        )

    def record(
        self,
        name: str,
        parent: str | Span,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
    ) -> None:
        """Make a span of what is over, under a span or a traceparent that is sampled or is not.

        It takes a fifth of the time of `start` and `end`, which prepare for what can still change.
        """
        above = _known(parent) if isinstance(parent, str) else parent.get_span_context()
        if not above.trace_flags.sampled:
            return
        own = SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)
        self._sender.on_end(
            ReadableSpan(
                name,
                own,
                above,
                self._provider.resource,
                attributes,
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
                status=_UNSET,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send what was not sent, for a few seconds at most."""
        self._provider.shutdown()


class _OneResource(Resource):
    """A resource with the hash of an object: the SDK's is of its JSON, made anew for each span."""

    __hash__ = object.__hash__


class _Ids(RandomIdGenerator):
    """Random ids, but for a span whose id was chosen."""

    next_id: int | None = None

    def generate_span_id(self) -> int:
        span_id, self.next_id = self.next_id, None
        return span_id or super().generate_span_id()


def link_to(span_id: int, traceparent: str) -> Link:
    """Return a link to a span of the trace that the traceparent belongs to."""
    parent = _known(traceparent)
    return Link(SpanContext(parent.trace_id, span_id, True, parent.trace_flags))


def failed(span: Span, code: str) -> None:
    span.set_status(StatusCode.ERROR, code)
    span.set_attribute("error.type", code)


def _context(parent: str | Span | None) -> Context:
    """Return a context of its own: that of whoever calls has nothing to do with it."""
    if isinstance(parent, str):
        parent = NonRecordingSpan(_known(parent))
    return Context() if parent is None else set_span_in_context(parent, Context())


def _known(traceparent: str) -> SpanContext:
    match = _TRACEPARENT.fullmatch(traceparent)
    assert match is not None, "a job's traceparent was checked when it was submitted"
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return SpanContext(trace_id, span_id, True, TraceFlags(flags))
