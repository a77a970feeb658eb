"""Asks OpenAI-compatible servers, ours and others, and notes when each piece of an answer comes."""

import asyncio
import json
import os
import re
import secrets
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.error import URLError

import msgspec

from penstock.loadtest.errors import BadOption, CannotMeasure
from penstock.loadtest.requests.measurement import Depth, Timeline
from penstock.loadtest.requests.tokens import SeenPiece
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request, as_text
from penstock.schemas.event import EVENT, Delta
from penstock.schemas.keys import JOB_ID
from penstock.schemas.metrics import names
from penstock.schemas.network.event_stream import (
    EventReader,
    HttpServer,
    Said,
    exchange,
    is_http_url,
)

_ANSWER_S = 3600.0  # a request that takes longer has failed
_LOG_S = 60.0  # a log is read after the job's end, so all of it is there
# What waits and what runs: Penstock's counts of jobs are those of the moment, while an engine's, by
# vLLM's names, are up to a second old.
_GAUGES = (
    (names.JOBS_QUEUED, names.JOBS_RUNNING),
    (names.REQUESTS_WAITING, names.REQUESTS_RUNNING),
)
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target(HttpServer):
    """A server to measure."""

    @property
    def local_port(self) -> int | None:
        """Return the port of a server on this machine, whose process can be found; else None."""
        return self.port if self.host in ("127.0.0.1", "localhost", "::1") else None

    async def first_model(self) -> str:
        return first_model(self)

    async def ask(
        self, model: str, request: Request, way: Way, begin_s: float | None = None
    ) -> Timeline:
        return await stream(self, way.endpoint, asked_of(model, request, way), begin_s)

    async def log(self, job_id: str) -> list[Delta] | None:
        """Return the log of a job of Penstock's; None for another server's answer.

        Raises CannotMeasure where Penstock does not give it.
        """
        if JOB_ID.fullmatch(job_id) is None:
            return None
        reader = _LogReader(self.http("GET", f"/v1/jobs/{job_id}/events"))
        if error := await exchange(self, reader, _LOG_S):
            raise CannotMeasure(f"the log of {job_id} cannot be read: {error}")
        return reader.deltas

    async def depth(self) -> Depth | None:
        """Return what waits and runs, by the server's metrics; None where they do not tell it."""
        return await asyncio.to_thread(self._depth)

    def _depth(self) -> Depth | None:
        request = urllib.request.Request(self.url("/metrics"), headers=self.authorization)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                samples = _SAMPLE.findall(answer.read().decode(errors="replace"))
        except (URLError, OSError):
            return None
        for gauges in _GAUGES:
            values = [[float(value) for name, value in samples if name == own] for own in gauges]
            if all(values):
                return Depth(time.perf_counter(), *map(sum, values))
        return None


def target(base_url: str, option: str = "--base-url") -> Target:
    """Return the target of a URL, with the environment's key. Raises BadOption for a bad URL."""
    if not is_http_url(base_url):
        raise BadOption(f"{option}: {base_url!r} is no http:// or https:// URL")
    return Target(base_url, os.environ.get("OPENAI_API_KEY"))


def first_model(server: Target) -> str:
    """Return the name of the server's first model. Raises CannotMeasure where it names none."""
    url = server.url("/v1/models")
    try:
        request = urllib.request.Request(url, headers=server.authorization)
        with urllib.request.urlopen(request, timeout=30) as answer:
            names = [str(entry["id"]) for entry in json.load(answer)["data"]]
    except URLError as error:
        raise CannotMeasure(f"{url}: {error.reason}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CannotMeasure(f"{url} names no model: {error!r}") from error
    if not names:
        raise CannotMeasure(f"{url} lists no model; none is served yet")
    return names[0]


def asked_of(model: str, request: Request, way: Way) -> dict[str, object]:
    fields: dict[str, object] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": way.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if way.endpoint == "/v1/completions":
        fields["prompt"] = request.prompt
    else:
        fields["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
    if request.schema is not None:
        form = {"name": "answer", "schema": request.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif way.ignore_eos:
        fields["ignore_eos"] = True
    return fields


async def stream(
    server: Target, endpoint: str, fields: Mapping[str, object], begin_s: float | None = None
) -> Timeline:
    """Send a request, and note when each piece of text comes.

    `begin_s` is when it was due; None means now. A failure is not raised, but noted in the
    timeline's `error`. The request begins a trace, in which a server that traces goes on.
    """
    trace_id = secrets.token_hex(16)
    traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    body = json.dumps(fields).encode()
    request = server.http("POST", endpoint, body, {"traceparent": traceparent})
    reader = _Reader(request, begin_s)
    reader.timeline.trace_id = trace_id
    await exchange(server, reader, _ANSWER_S)
    reader.timeline.end_s = reader.ended_s
    return reader.timeline


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        if self.delta is not None:
            return (self.delta.content or "") + (self.delta.reasoning_content or "")
        return self.text or ""

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


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Said | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_DONE = b"[DONE]"


class _Reader(EventReader):
    """Reads the stream of an answer."""

    def __init__(self, request: bytes, begin_s: float | None) -> None:
        super().__init__(request)
        self.ended_s = 0.0
        now_s = time.perf_counter()
        self.timeline = Timeline(now_s if begin_s is None else begin_s, 0, sent_s=now_s)
        self._text = ""  # an event's chunks before its last, which alone has the event's id

    def fail(self, error: str) -> None:
        super().fail(error)
        self.timeline.error = self.error

    def _end(self) -> None:
        self.ended_s = self.ended_s or time.perf_counter()
        super()._end()

    def take(self, event_id: str, event: bytes) -> None:
        if event == _DONE:
            self.is_done = True
            return
        timeline, chunk, now_s = self.timeline, _decode(event), time.perf_counter()
        if chunk.error is not None:
            self.fail(chunk.error if isinstance(chunk.error, str) else chunk.error.message)
            return
        if any(choice.is_piece for choice in chunk.choices):
            timeline.tokens_s.append(now_s)
        for choice in chunk.choices:
            self._text += choice.said
            timeline.finish_reason = choice.finish_reason or timeline.finish_reason
        if (event_id or self._text) and "." not in event_id:
            timeline.pieces.append(SeenPiece(event_id, self._text))
            self._text = ""
        if chunk.usage is not None:
            timeline.num_prompt = chunk.usage.prompt_tokens
            timeline.num_counted = chunk.usage.completion_tokens
        if not timeline.job_id:
            own = chunk.id.partition("-")[2]
            timeline.job_id = own if JOB_ID.fullmatch(own) else chunk.id


class _LogReader(EventReader):
    """Reads the log of a job that has ended."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.deltas: list[Delta] = []

    def take(self, event_id: str, event: bytes) -> None:
        entry = EVENT.validate_json(event)
        if isinstance(entry, Delta):
            self.deltas.append(entry)
        else:
            self.is_done = True
