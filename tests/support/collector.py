"""A receiver of OTLP over HTTP, which reads what it gets by the protocol's own messages."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class SeenSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    links: list[str]
    events: list[str]
    has_failed: bool


class Collector:
    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.bodies: list[bytes] = []
        seen = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                seen.bodies.append(body)
                seen.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def spans_of(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    found = []
    for resource in request.resource_spans:
        named = {each.key: _value(each.value) for each in resource.resource.attributes}
        found += [
            SeenSpan(
                str(named["service.name"]),
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                {each.key: _value(each.value) for each in span.attributes},
                [link.span_id.hex() for link in span.links],
                [event.name for event in span.events],
                span.status.code == 2,
            )
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    return found


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
