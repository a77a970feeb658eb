"""HTTP/1.1 by uvicorn, with bounds on large heads, slow callers and many connections."""

import asyncio
import re
from dataclasses import dataclass
from random import uniform

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.gateway.auth.web_pages import host_in
from penstock.gateway.openai.responses import error
from penstock.schemas.event import ErrorBody
from penstock.schemas.network.gone_peer import end_when_gone

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_TARGET_BYTES = 8 * 1024  # path and query, each part of which is looked at
MAX_PIPELINED = 16  # requests that wait for one before them, on one connection
_SLICE_BYTES = 8 * 1024
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on how long a caller may take, and on how many may be connected."""

    head_s: float
    body_s: float
    stall_s: float
    max_connections: int
    last_call_s: float  # how long an idle connection outlives the beginning of the end


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Past a bound it sends an error in OpenAI's form, and closes."""

    patience: Timeouts

    _in_head = True  # and between messages
    _is_ending = False
    _is_socket = False  # a websocket has taken the connection over
    _head_bytes = 0
    _refusal: ErrorBody | None = None
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        end_when_gone(transport, self.patience.stall_s)
        if len(self.connections) > self.patience.max_connections:
            self._refuse(_error(503, "too_many_connections", "too many connections; try again"))
        else:
            self._wait(self.patience.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start a timer that cuts the caller off, unless it takes more of what it is sent."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.patience.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Feed the data to the parser in slices.

        A head is measured by the bytes that were fed of it until the parser sees its end.
        """
        at = 0
        while at < len(data) and not self.transport.is_closing() and not self._is_socket:
            room = MAX_HEAD_BYTES - self._head_bytes if self._in_head else _SLICE_BYTES
            piece = data[at : at + min(room, _SLICE_BYTES)]
            at += len(piece)
            if self._in_head and self._timer is None:
                self._wait(self.patience.head_s)
            if piece:
                super().data_received(piece)
            else:
                self._refusal = _error(
                    431, "head_too_large", f"the head is larger than {MAX_HEAD_BYTES} bytes"
                )
            self._head_bytes = self._head_bytes + len(piece) if self._in_head else 0
            if self._refusal is not None:
                self._refuse(self._refusal)

    def handle_websocket_upgrade(self) -> None:
        if self._refusal is not None:
            return
        self._is_socket = True
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            message = f"path and query are longer than {MAX_TARGET_BYTES} bytes"
            self._refusal = _error(414, "target_too_long", message)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            message = f"the head has more than {MAX_HEADERS} fields"
            self._refusal = _error(431, "head_too_large", message)

    def on_headers_complete(self) -> None:
        self._find_host()
        if self._refusal is None and len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection"
            self._refusal = _error(429, "too_many_pipelined", message)
        if self._refusal is None:
            self._in_head, self._head_bytes = False, 0
            self._wait(self.patience.body_s)
            super().on_headers_complete()
            if self._is_ending:
                self.cycle.keep_alive = False

    def _find_host(self) -> None:
        """Refuse a request without one `Host`; that of a target that is a URL overrules it.

        HTTP/1.0 needs none.
        """
        hosts = [value for name, value in self.headers if name == b"host"]
        is_one = len(hosts) == 1 or (not hosts and self.parser.get_http_version() == "1.0")
        if authority := _AUTHORITY.match(self.url):
            hosts = [authority[1]]
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", authority[1]))
        if not (is_one and all(host_in(host.decode("latin-1")) for host in hosts)):
            message = "Host: a request has one, which is a name or an address, and a port"
            self._refusal = self._refusal or _error(400, "invalid_host", message)

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        if self._refusal is None:
            super().on_message_complete()
        self._in_head = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_ending:
            self._begin_last_call()

    def shutdown(self) -> None:
        """End the connection with the next answer whose head can say so.

        A connection that is closed between two requests fails the one that is on its way. So it
        stays open for a last call, and so does one whose answer began before this.
        """
        self._is_ending = True
        if not self._is_answering:
            self._begin_last_call()
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _begin_last_call(self) -> None:
        self.loop.call_later(self.patience.last_call_s, self._end_last_call)

    def _end_last_call(self) -> None:
        if not self._is_answering:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_error(400, "invalid_request", "this is not a request in HTTP/1.1"))

    def _refuse(self, body: ErrorBody) -> None:
        """Send the error, unless an answer was begun, and close."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_between = self._in_head and cycle is not None and cycle.response_complete
        if cycle is None or is_between or not cycle.response_started:
            content = to_json(error(body))
            self.transport.write(
                STATUS_LINE[body.status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"x-should-retry: %s\r\n" % (b"true" if body.retryable else b"false")
                + b"content-length: %d\r\n\r\n" % len(content)
                + content
            )
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        """Start the timer for a slow caller, with up to a fifth more seconds.

        So thousands of callers who came together are not sent away in one moment.
        """
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds * uniform(1, 1.2), self._lose_patience)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _lose_patience(self) -> None:
        """Refuse a caller who took too long, unless it is the gateway that lets it wait."""
        self._timer = None
        if self.flow.read_paused or (self._in_head and self._is_answering):
            self._wait(self.patience.head_s)
        else:
            self._refuse(_error(408, "too_slow", "the request did not arrive in time"))


def bounded(limits: Timeouts) -> type[BoundedProtocol]:
    """Return the protocol with these limits; uvicorn makes an instance for each connection."""
    return type("Protocol", (BoundedProtocol,), {"patience": limits})


def _error(status: int, code: str, message: str) -> ErrorBody:
    return ErrorBody(code=code, message=message, status=status, retryable=status in (408, 503))
