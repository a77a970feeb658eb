"""Reads server-sent events (SSE) at little cost, by a request that ends its connection.

Of the readers looked at, with 64 streams and one event a chunk, httpx takes 150 us of CPU an event,
httpcore 105, aiohttp 60, h11 52; httptools on a bare protocol, with msgspec for the JSON, 24.
"""

import asyncio
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock.schemas.network.gone_peer import end_when_gone

_DATA, _ID = b"data:", b"id:"
_MAX_CHARS = 300  # characters of a server's words
MAX_HEAD_BYTES = 64 * 1024
MAX_HELD_BYTES = 4 * 2**20  # the longest line, or answer that is no stream
GONE_S = 30.0  # after which a server that is gone without a word is noticed


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server, named by the URL that has `/v1` below it; a URL may also end with `/v1`."""

    base_url: str
    api_key: str | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def is_tls(self) -> bool:
        return urlsplit(self.base_url).scheme == "https"

    @property
    def port(self) -> int:
        return urlsplit(self.base_url).port or (443 if self.is_tls else 80)

    @property
    def authorization(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def url(self, endpoint: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + endpoint

    def http(
        self, method: str, endpoint: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> bytes:
        """Return a request, whose response ends the connection."""
        lines = [
            f"{method} {urlsplit(self.url(endpoint)).path} HTTP/1.1",
            f"Host: {urlsplit(self.base_url).netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in (self.authorization | dict(headers)).items()),
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body


def is_http_url(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


class EventReader(asyncio.Protocol):
    """Reads one response of server-sent events; `ended` is set at its end, or at its failure."""

    def __init__(self, request: bytes) -> None:
        self.end = asyncio.get_running_loop().create_future()
        self.error = ""
        self.status = 0  # HTTP's status; 0 before the response's head
        self.is_done = False  # by an event that says so
        self.retry_after = ""
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""  # the start of a line that has not come whole
        self._event_id = ""
        self._is_stream = False
        self._head_bytes = 0  # received before the body began

    def take(self, event_id: str, event: bytes) -> None:
        """Take one event's data."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        end_when_gone(transport, GONE_S)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.end.done():
            return
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self.fail(f"an answer that cannot be read: {error.__context__ or error}")
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            self.fail(f"the answer's head is longer than {MAX_HEAD_BYTES} bytes")

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_stream and self.is_done:
            self._end()
        else:
            self.fail(str(error) if error else "the connection ended before the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")
        elif name.lower() == b"retry-after":
            self.retry_after = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status != 200:
            self._is_stream = False

    def on_body(self, body: bytes) -> None:
        body = self._rest + body
        if not self._is_stream:
            self._rest = body
            if len(body) > MAX_HELD_BYTES:
                self.on_message_complete()
            return
        *lines, self._rest = body.split(b"\n")
        if len(self._rest) > MAX_HELD_BYTES:
            self.fail(f"a line is longer than {MAX_HELD_BYTES} bytes")
        for line in lines:
            if line.startswith(_DATA):
                event_id, self._event_id = self._event_id, ""
                self.take(event_id, line[len(_DATA) :].strip())
            elif line.startswith(_ID):
                self._event_id = line[len(_ID) :].strip().decode()

    def on_message_complete(self) -> None:
        if not self._is_stream:
            self.fail(f"status {self.status}: {_words(self._rest)}")
        elif not self.is_done:
            self.fail("the stream ended before its [DONE]")
        else:
            self._end()

    def fail(self, error: str) -> None:
        if not self.end.done():
            self.error = error
            self._end()

    def _end(self) -> None:
        if not self.end.done():
            self.end.set_result(None)


class PageReader(EventReader):
    """Reads one response that is no stream, into `page`; up to MAX_HELD_BYTES of it."""

    page = b""
    _ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_message_complete(self) -> None:
        if not 200 <= self.status < 300:
            super().on_message_complete()
        elif not self.end.done():
            self.page = self._rest
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self.status and self._ends_with_connection:
            self.on_message_complete()
        else:
            super().connection_lost(error)


async def exchange(server: HttpServer, reader: EventReader, most_s: float | None) -> str:
    """Send the reader's request, and return when its response has ended: empty, or the error."""
    transport: asyncio.Transport | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(most_s):
            transport, _ = await loop.create_connection(
                lambda: reader, server.host, server.port, ssl=server.is_tls or None
            )
            await asyncio.shield(reader.end)  # a time-out leaves it to be failed
    except TimeoutError:
        reader.fail(f"no end within {most_s:g} s")
    except (OSError, UnicodeError) as error:  # the latter of a host's name
        reader.fail(_why(error))
    finally:
        if transport is not None:
            transport.abort()
    return reader.error


def _why(error: OSError | UnicodeError) -> str:
    """Return the reason in the system's words; where several addresses were tried, in all theirs.

    They are refused as one is.
    """
    number = error.errno if isinstance(error, OSError) else None
    if f"[Errno {errno.ECONNREFUSED}]" in str(error):
        number = errno.ECONNREFUSED
    return os.strerror(number) if number and number > 0 else str(error)


class Said(msgspec.Struct):
    """The words of a server about a failure."""

    message: str = ""
    code: int | str | None = None


class _Refusal(msgspec.Struct):
    error: Said | str | None = None


def _words(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    message = error.message if isinstance(error, Said) else error
    return (message or body.decode(errors="replace"))[:_MAX_CHARS]
