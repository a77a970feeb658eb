"""Reads streamed answers of an OpenAI-compatible server at little cost, since it shares the cores.

Of the readers looked at, with 64 streams and one event a chunk, httpx takes 150 us of CPU an event,
httpcore 105, aiohttp 60, h11 52; httptools on a bare protocol, with msgspec for the JSON, 24.
"""

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import URLError
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock.loadtest.errors import BadOption, CannotMeasure
from penstock.loadtest.requests.measurement import Timeline

_ANSWER_S = 3600.0  # a request that takes longer has failed
_SHOWN = 300  # characters of a server's words


@dataclass(frozen=True, slots=True)
class Target:
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
    def local_port(self) -> int | None:
        """Return the port of a server on this machine, whose process can be found; else None."""
        return self.port if self.host in ("127.0.0.1", "localhost", "::1") else None

    def url(self, endpoint: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + endpoint

    def head(self, endpoint: str, num_bytes: int) -> bytes:
        """Return the head of a request."""
        lines = [
            f"POST {urlsplit(self.url(endpoint)).path} HTTP/1.1",
            f"Host: {urlsplit(self.base_url).netloc}",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.authorization.items()),
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()

    @property
    def authorization(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def target(base_url: str, option: str = "--base-url") -> Target:
    """Return the target of a URL, with the environment's key. Raises BadOption for a bad URL."""
    parts = urlsplit(base_url)
    try:
        is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_good = False
    if not is_good:
        raise BadOption(f"{option}: {base_url!r} is no http:// or https:// URL")
    return Target(base_url, os.environ.get("OPENAI_API_KEY"))


def first_model(server: Target) -> str:
    """Return the name of the server's first model. Raises CannotMeasure where it names none."""
    url = server.url("/v1/models")
    try:
        asked = urllib.request.Request(url, headers=server.authorization)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except URLError as error:
        raise CannotMeasure(f"{url}: {error.reason}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CannotMeasure(f"{url} names no model: {error!r}") from error


async def stream(server: Target, endpoint: str, asked: Mapping[str, object]) -> Timeline:
    """Send a request, and note when each piece of text comes.

    A failure is not raised, but noted in the timeline's `error`.
    """
    body = json.dumps(asked).encode()
    reader = _Reader(server.head(endpoint, len(body)) + body)
    transport: asyncio.BaseTransport | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_ANSWER_S):
            transport, _ = await loop.create_connection(
                lambda: reader, server.host, server.port, ssl=server.is_tls or None
            )
            await reader.ended
    except TimeoutError:
        reader.fail(f"no end within {_ANSWER_S:.0f} s")
    except OSError as error:
        reader.fail(os.strerror(error.errno) if error.errno and error.errno > 0 else str(error))
    finally:
        if transport is not None:
            transport.close()
    reader.timeline.end_s = reader.timeline.end_s or time.perf_counter()
    return reader.timeline


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def is_piece(self) -> bool:
        """Return whether the choice brings a piece of the answer.

        A token may have no text of its own, as the chunks that open and close an answer have none.
        """
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content)
        return bool(self.text) or self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_DATA, _DONE = b"data:", b"[DONE]"


class _Reader(asyncio.Protocol):
    """Reads one response; `ended` is set at its end, or at its failure."""

    def __init__(self, request: bytes) -> None:
        self.timeline = Timeline(time.perf_counter(), 0)
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""  # the start of a line that has not come whole
        self._is_stream = False
        self._is_done = False

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self.fail(f"an answer that cannot be read: {error.__context__ or error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_stream and self._is_done:
            self._end()
        else:
            self.fail(str(error) if error else "the connection ended before the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._is_stream = False

    def on_body(self, body: bytes) -> None:
        body = self._rest + body
        if not self._is_stream:
            self._rest = body
            return
        *lines, self._rest = body.split(b"\n")
        now_s = time.perf_counter()
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip(), now_s)

    def on_message_complete(self) -> None:
        if not self._is_stream:
            self.fail(f"status {self._parser.get_status_code()}: {_words(self._rest)}")
        elif not self._is_done:
            self.fail("the stream ended before its [DONE]")
        else:
            self._end()

    def fail(self, error: str) -> None:
        if not self.ended.done():
            self.timeline.error = error
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.timeline.end_s = time.perf_counter()
            self.ended.set_result(None)

    def _take(self, event: bytes, now_s: float) -> None:
        if event == _DONE:
            self._is_done = True
            return
        chunk = _decode(event)
        if chunk.error is not None:
            self.fail(chunk.error if isinstance(chunk.error, str) else chunk.error.message)
        if any(choice.is_piece for choice in chunk.choices):
            self.timeline.tokens_s.append(now_s)
        if chunk.usage is not None:
            self.timeline.num_prompt = chunk.usage.prompt_tokens
            self.timeline.num_counted = chunk.usage.completion_tokens


def _words(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    said = error.message if isinstance(error, _Error) else error
    return (said or body.decode(errors="replace"))[:_SHOWN]
