"""Reads the lines of a batch from its file, makes jobs of them, and shapes answers as OpenAI's."""

import codecs
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import from_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.batches.endpoints import ENDPOINTS, error_in
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.pooling import PoolingContext
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.validation import refuse_extremes
from penstock.schemas.api.json_size import too_much
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import ErrorBody, Result
from penstock.schemas.wire.wire import Report

MAX_LINES = 50_000
MAX_LINE_BYTES = 4 * 2**20
MAX_COMPLAINTS = 100
ANSWER_HEAD = b'{"id":"batch_req_'  # begins each line of a batch's answers
OF_BATCHES = {"background": True, "priority_class": "batch", "over_limit": "wait"}


class BatchLine(Report):
    """One request, as the input file holds it."""

    custom_id: str = Field(min_length=1, max_length=512)
    method: str
    url: str
    body: JsonObject

    def with_model(self, model: str) -> Self:
        """Return the line, with the model where it names none."""
        if self.body.get("model") not in (None, ""):
            return self
        return self.model_copy(update={"body": {**self.body, "model": model}})


@dataclass(frozen=True, slots=True)
class LinePosition:
    """The place of a line in its file: its offset and its length, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Open:
    """A line whose job is in the queue."""

    number: int
    job_id: str
    place: LinePosition

    @classmethod
    def read(cls, number: int, text: str) -> "Open":
        job_id, offset, length = text.split()
        return cls(number, job_id, LinePosition(int(offset), int(length)))

    def __str__(self) -> str:
        return f"{self.job_id} {self.place.offset} {self.place.length}"


def lines_from(path: Path, offset: int) -> Iterator[tuple[LinePosition, bytes]]:
    """Yield the lines from an offset on that are not blank, each with its place.

    A byte order mark at the beginning of the file is of no line.
    Of a line that is too long the first `MAX_LINE_BYTES + 1` bytes are read, and the rest skipped.
    """
    with path.open("rb") as file:
        if offset == 0 and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            offset = len(codecs.BOM_UTF8)
        file.seek(offset)
        while raw := file.readline(MAX_LINE_BYTES + 1):
            length, end = len(raw), raw
            while len(end) > MAX_LINE_BYTES and not end.endswith(b"\n"):
                end = file.readline(MAX_LINE_BYTES + 1)
                length += len(end)
            if raw.strip():
                yield LinePosition(offset, length), raw
            offset += length


def line_heads(path: Path, places: Sequence[LinePosition]) -> list[BatchLine]:
    """Return the lines at some places. Of their bodies, which may be large, the model is kept."""
    lines = (line_at(path, place) for place in places)
    return [line.model_copy(update={"body": {"model": line.body.get("model")}}) for line in lines]


def digest_of(custom_id: str) -> bytes:
    """Return what stands for a custom id where a million of them are remembered."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def line_at(path: Path, place: LinePosition) -> BatchLine:
    """Return the line at a place. `line_errors` must have checked the file before."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return BatchLine.model_validate_json(file.read(place.length))


def line_errors(
    path: Path, endpoint: str | None, most: int = MAX_LINES
) -> tuple[int, list[dict[str, JsonValue]]]:
    """Return the number of lines of a file, and at most a hundred errors in them.

    It stops early once it has a hundred errors, or more than `most` lines. Only a line's form,
    custom_id, method and url are checked: a wrong body fails that line's own job. With no endpoint
    each line may have another.
    """
    digests, count, wrong = set[bytes](), 0, list[dict[str, JsonValue]]()
    for count, (_, raw) in enumerate(lines_from(path, 0), 1):
        code = "too_many_lines" if count > most else "invalid_line"
        sentence = _line_error(raw, endpoint, digests)
        if count > most:
            sentence = f"the file has more than {most} lines"
        if sentence:
            wrong.append({"code": code, "line": count, "message": sentence, "param": None})
        if count > most or len(wrong) >= MAX_COMPLAINTS:
            break
    if not count:
        wrong.append({"code": "empty_file", "line": None, "message": "no lines", "param": None})
    return count, wrong


def form_of(job_id: str, caller: Caller, line: BatchLine) -> AnswerContext | PoolingContext:
    """Return the job that a line asks for, with how to answer it. Raises InvalidJob."""
    if line.body.get("stream"):
        raise InvalidJob("stream: a batch's lines are answered whole", "stream")
    body: JsonObject = {name: value for name, value in line.body.items() if value is not None}
    refuse_extremes(body)
    form: AnswerContext | PoolingContext = ENDPOINTS[line.url].form(caller, body, job_id)
    return replace(form, job=form.job.model_copy(update=OF_BATCHES))


def answer_line(
    job_id: str, line: BatchLine, form: AnswerContext | PoolingContext, result: Result
) -> bytes:
    body = ENDPOINTS[line.url].shape(form, result)
    return _line(job_id, line, {"status_code": 200, "request_id": job_id, "body": body}, None)


def refused_line(job_id: str, line: BatchLine, body: ErrorBody) -> bytes:
    """Return the output line of a request that failed, with the answer that HTTP would give."""
    response: JsonObject = {
        "status_code": body.status,
        "request_id": job_id,
        "body": error_in(line.url, body),
    }
    return _line(job_id, line, response, None)


def abandoned_line(job_id: str, line: BatchLine, code: str, sentence: str) -> bytes:
    """Return the output line of a request that was not done when its batch ended."""
    return _line(job_id, line, None, {"code": code, "message": sentence})


def _line(
    job_id: str, line: BatchLine, response: JsonObject | None, failure: JsonObject | None
) -> bytes:
    shape = {
        "id": f"batch_req_{job_id[-26:]}",
        "custom_id": line.custom_id,
        "response": response,
        "error": failure,
    }
    return to_json_in_pieces(shape) + b"\n"


def _line_error(raw: bytes, endpoint: str | None, digests: set[bytes]) -> str | None:
    if len(raw) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES} bytes"
    if excess := too_much(raw):
        return f"holds {excess}"
    try:
        line = BatchLine.model_validate(from_json(raw, allow_inf_nan=False), strict=True)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}"
    except ValueError:
        return "not valid JSON"
    if line.method != "POST":
        return "method: must be POST"
    if endpoint is None and line.url not in ENDPOINTS:
        return f"url: give one of {', '.join(ENDPOINTS)}"
    if endpoint is not None and line.url != endpoint:
        return f"url: must be {endpoint}, as the batch's endpoint"
    digest = digest_of(line.custom_id)
    if digest in digests:
        return f"custom_id: {line.custom_id[:64]!r} is given twice"
    digests.add(digest)
    return None
