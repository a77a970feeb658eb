"""Runs the lines of a file as jobs, and writes their answers to another file.

A line's job has an id that follows from the line and from the file of answers, and is deleted once
its answer is written. So a run that ended anywhere goes on where it was: lines whose answers are
there are left out, and jobs that are still in the queue are waited for.
"""

import asyncio
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.batches.lines import (
    ANSWER_HEAD,
    BatchLine,
    LinePosition,
    answer_line,
    digest_of,
    form_of,
    line_at,
    line_errors,
    lines_from,
    refused_line,
)
from penstock.gateway.batches.order import in_groups
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import Outcome
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, Unavailable
from penstock.schemas.event import Usage

AHEAD = 16_384  # lines that are read at once, and run in groups of those that begin alike
STREAM_INTERVAL = 16  # nobody reads the tokens as they come, and fewer events cost less
RETRY_S = 1.0
SYNC_S = 2.0
LAST_S = 5.0  # to cancel what is left in the queue


class FileTaken(Exception):
    """Raised when another process writes the same file of answers."""


class WrongLines(Exception):
    """Raised when lines of a file are no requests, or no answers; the message names the first."""


@dataclass(slots=True)
class BatchProgress:
    """How far a run is, in lines and in tokens."""

    total: int = 0
    before: int = 0  # answered by earlier runs
    done: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def count(self, usage: Usage, is_good: bool) -> None:
        self.done += 1
        self.num_failed += not is_good
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens


@dataclass(frozen=True, slots=True)
class _LineAnswer:
    text: bytes
    job_id: str = ""  # the job that is to be deleted
    usage: Usage = field(default_factory=Usage)
    is_good: bool = False


@dataclass(slots=True, eq=False)
class OfflineBatch:
    """One run of a file's lines.

    source   one request a line, as in OpenAI's batches; each may ask another endpoint
    sink     gets the answers as they come, and why lines failed
    at_once  the most jobs in the queue
    model    for lines that name none
    """

    client: QueueClient
    source: Path
    sink: Path
    at_once: int
    model: str = ""
    progress: BatchProgress = field(default_factory=BatchProgress)
    _digests: set[bytes] = field(default_factory=set)  # digests of the custom ids that have answers
    _open: set[str] = field(default_factory=set)  # jobs that may be in the queue

    async def run(self, retries_failed: bool = False) -> None:
        """Answer all lines; with `retries_failed` also those that failed in an earlier run.

        Raises WrongLines, FileTaken, OSError.
        """
        await asyncio.to_thread(self._check)
        with _owned(self.sink, retries_failed) as sink:
            await asyncio.to_thread(self._resume, sink)
            lines: asyncio.Queue[LinePosition | None] = asyncio.Queue(self.at_once)
            try:
                async with asyncio.TaskGroup() as group:
                    sync_task = group.create_task(_sync(sink))
                    workers = [
                        group.create_task(self._work(lines, sink)) for _ in range(self.at_once)
                    ]
                    await self._read(lines)
                    await asyncio.wait(workers)
                    sync_task.cancel()
            except ExceptionGroup as failures:  # the first has ended the others
                raise failures.exceptions[0] from None
            finally:
                os.fsync(sink.fileno())
                await self._leave_nothing()

    def _check(self) -> None:
        self.progress.total, wrong = line_errors(self.source, None, 2**62)
        if wrong:
            first = wrong[0]
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            place = f"line {first['line']}: " if first["line"] else ""
            raise WrongLines(f"{self.source}: {place}{first['message']}{more}")

    def _resume(self, sink: BinaryIO) -> None:
        """Learn which lines have answers, and cut off an answer that was not written whole."""
        end = 0
        for raw, name, _ in _whole_answers(self.sink):
            self._digests.add(digest_of(name))
            end += len(raw)
        sink.truncate(end)
        sink.seek(end)
        self.progress.before = len(self._digests)

    async def _read(self, lines: "asyncio.Queue[LinePosition | None]") -> None:
        """Hand out the lines that have no answer, those that begin alike one after another."""
        ahead = _ahead(self.source, self._digests)
        while places := await asyncio.to_thread(next, ahead, None):
            for place in places:
                await lines.put(place)
        for _ in range(self.at_once):
            await lines.put(None)

    async def _work(self, lines: "asyncio.Queue[LinePosition | None]", sink: BinaryIO) -> None:
        while place := await lines.get():
            answer = await self._answer(place)
            sink.write(answer.text)
            self.progress.count(answer.usage, answer.is_good)
            await self._forget(answer.job_id)

    async def _answer(self, place: LinePosition) -> _LineAnswer:
        line = await self.client.off_loop.run(
            self.client.tenant, place.length, line_at, self.source, place
        )
        while True:
            try:
                return await self._ask(line, place)
            except Unavailable as error:
                await asyncio.sleep(max(RETRY_S, (error.retry_after_ms or 0) / 1000))
            except (JobGone, JobNotFound):  # its result was kept no longer
                await asyncio.sleep(RETRY_S)
            except PenstockError as error:
                return _LineAnswer(refused_line(self._identity(line), line, error.body()))

    async def _ask(self, line: BatchLine, place: LinePosition) -> _LineAnswer:
        """Ask for a line's answer, and wait for it. Raises PenstockError."""
        client = self.client
        if line.body.get("model") in (None, ""):
            line = line.with_model(self.model or await client.only_model())
        model, key = line.body["model"], self._identity(line)
        job_id = await client.name_job(model if isinstance(model, str) else "", key)
        caller = Caller(client.tenant)
        form = await client.off_loop.run(caller.tenant, place.length, form_of, job_id, caller, line)
        self._open.add(job_id)
        job = form.job.model_copy(update={"stream_interval": STREAM_INTERVAL})
        answer = await client.submit(job)
        result = await client.result(job_id)
        assert result is not None
        if result.state == "cancelled" and answer.outcome is Outcome.DUPLICATE:
            await self._forget(job_id)  # a run that was stopped left it so
            return await self._ask(line, place)
        if result.error is not None:
            return _LineAnswer(refused_line(job_id, line, result.error), job_id, result.usage)
        num_scored = sum(len(choice.prompt_logprobs or ()) for choice in result.choices)
        size = form.job.answer_bytes(result.usage.completion_tokens, num_scored) // 8
        text = await client.off_loop.run(
            caller.tenant, size, answer_line, job_id, line, form, result
        )
        return _LineAnswer(text, job_id, result.usage, is_good=True)

    def _identity(self, line: BatchLine) -> str:
        identity = json.dumps([str(self.sink.resolve()), line.model_dump()], sort_keys=True)
        return f"run-batch {hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"

    async def _forget(self, job_id: str) -> None:
        self._open.discard(job_id)
        if job_id:
            with suppress(JobNotFound, JobGone, Unavailable):
                await self.client.delete(job_id)

    async def _leave_nothing(self) -> None:
        """Erase the jobs that nobody waits for any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await asyncio.gather(*map(self._forget, list(self._open)))


@contextmanager
def _owned(path: Path, retries_failed: bool) -> Iterator[BinaryIO]:
    """Open the file of answers for this process alone. Raises FileTaken, OSError.

    With `retries_failed` it is replaced by one without the lines that failed.
    """
    with _locked(path) as sink:
        if not retries_failed:
            yield sink
            return
        part = path.with_name(f"{path.name}.part")
        with _locked(part) as good:
            good.truncate(0)
            good.writelines(raw for raw, _, is_good in _whole_answers(path) if is_good)
            os.fsync(good.fileno())
            part.replace(path)
            yield good


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileTaken(f"{path}: another process writes it") from None
        yield file


async def _sync(sink: BinaryIO) -> None:
    while True:
        await asyncio.sleep(SYNC_S)
        await asyncio.to_thread(os.fsync, sink.fileno())


def _whole_answers(path: Path) -> Iterator[tuple[bytes, str, bool]]:
    """Yield the lines that were written whole: each, its custom id, and whether it is an answer.

    Raises WrongLines for a file that no run wrote: it must not be cut off or added to.
    """
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.endswith(b"\n") and raw[: len(ANSWER_HEAD)] == ANSWER_HEAD[: len(raw)]:
                return
            try:
                answer = from_json(raw)
                name, response = str(answer["custom_id"]), answer["response"]
                is_good = response is not None and response["status_code"] < 400
            except (ValueError, KeyError, TypeError):
                sentence = f"line {number} is no answer to a line of a batch; name another file"
                raise WrongLines(f"{path}: {sentence}") from None
            yield raw, name, is_good


def _ahead(source: Path, but: set[bytes]) -> Iterator[list[LinePosition]]:
    """Yield the places of lines, many at a time, in the order in which they are to run."""
    lines = lines_from(source, 0)
    while window := list(islice(lines, AHEAD)):
        read = [(place, BatchLine.model_validate_json(raw)) for place, raw in window]
        rest = [(place, line) for place, line in read if digest_of(line.custom_id) not in but]
        if rest:
            yield [rest[at][0] for at in in_groups(line.body for _, line in rest)]
