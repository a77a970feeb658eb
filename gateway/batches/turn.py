"""One turn of a batch: reads its lines, keeps some of them in the queue, writes their answers.

The state of a batch is in Redis, and each step changes it in one write. Lines are noted as open
before they are submitted, under ids that come out the same at a repeat. Answers are on disk before
their lines are noted as closed. So a process may die anywhere, and the next turn neither loses a
line nor repeats one.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.batches.batches import ENDED, Batches, BatchRecord
from penstock.gateway.batches.lines import (
    BatchLine,
    Open,
    abandoned,
    answered,
    form_of,
    line_at,
    line_errors,
    line_heads,
    refused,
)
from penstock.gateway.batches.order import PlacedLine, read_order, write_order
from penstock.gateway.batches.parts import Parts, Written, closing, part_path, writing
from penstock.gateway.files.files import FileRecord, Files
from penstock.gateway.openai.pooling import PoolingContext
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.due import Held
from penstock.gateway.tasks.outbox import Note
from penstock.gateway.webhooks.webhooks import Occurrence, Webhooks
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, Unavailable
from penstock.schemas.event import Result
from penstock.schemas.job import Job
from penstock.schemas.keys import short_digest
from penstock.schemas.process.crash_points import reach

TURN_S = 10.0  # then other batches come first
AT_ONCE = 64  # lines in one step
IDLE_MS = 30_000  # the longest wait; a line's end wakes its batch earlier
REASONS = {
    "batch_cancelled": "the batch was cancelled before this request was done",
    "batch_expired": "the completion window was over before this request was done",
}


@dataclass(frozen=True, slots=True)
class BatchTools:
    """Holds what a turn works with.

    window   the most lines of a batch that are in the queue at once
    """

    client: QueueClient
    files: Files
    batches: Batches
    webhooks: Webhooks
    window: int


@dataclass(slots=True, eq=False)
class BatchTurn:
    """One turn of one batch, in the process that holds it."""

    home: BatchTools
    held: Held
    batch: BatchRecord
    turn: int

    async def run(self) -> None:
        if await self._has_no_key():
            self.batch = await self.home.batches.cancel(self.batch.tenant, self.batch.id)
        until = time.monotonic() + TURN_S
        if self.batch.status == "validating":
            await self._validate()
        if self.batch.status == "in_progress":
            lengths = (self.batch.output_bytes, self.batch.errors_bytes)
            with writing(self.home.files.folder, self.batch.id, lengths) as parts:
                if parts is None:  # a process that was frozen still has them
                    self.held.again_ms = 1000
                    return
                while self.batch.status == "in_progress" and await self._step(parts):
                    if time.monotonic() > until:
                        self.held.again_ms = 0
                        return
        if self.batch.status == "finalizing":
            await self._finalize()

    async def _has_no_key(self) -> bool:
        """Return whether the key that the batch was made with is revoked or expired since."""
        account = self.batch.account
        key_id = account.name.rpartition("/")[2] if account else ""
        return bool(key_id) and await KeyStore(self.home.client.redis).has_ended(key_id)

    async def fail(self, errors: Sequence[Mapping[str, JsonValue]]) -> None:
        await self._keep({"status": "failed", "errors": json.dumps(errors), "ended_ms": None})

    async def tell(self) -> None:
        """Tell the webhooks that the batch has ended, if it has.

        It is repeated if this process dies before it has put the batch back.
        """
        batch = self.batch
        if batch.status not in ENDED or batch.ended_ms is None:
            return
        for kind in ("output", "errors", "order", "input"):
            part_path(self.home.files.folder, batch.id, kind).unlink(missing_ok=True)
        kind, told = f"batch.{batch.status}", {"status": batch.status}
        occurrence = Occurrence(batch.tenant, kind, batch.id, batch.ended_ms, told)
        await self.home.webhooks.tell(occurrence, batch.asked.webhook or "")
        self.held.again_ms = -1

    async def _validate(self) -> None:
        try:
            path = await self._input()
            total, wrong = await asyncio.to_thread(line_errors, path, self.batch.asked.endpoint)
            if not wrong:
                await asyncio.to_thread(write_order, path, self._order, True)
        except JobNotFound as error:
            total, wrong = 0, [file_error(error)]
        if wrong:
            await self.fail(wrong)
        else:
            begun = {"status": "in_progress", "in_progress_ms": None}
            await self._keep({**begun, "total": total, "is_grouped": 1})

    async def _step(self, parts: Parts) -> bool:
        """Collect answers, or else submit lines.

        Returns False when there is nothing to do until a job ends or time has passed.
        """
        batch, stop = self.batch, await self._stop()
        texts = await self.home.batches.open_lines(batch.id)
        opened = {number: Open.read(number, text) for number, text in texts.items()}
        items = await self.home.batches.due.items(batch.id, AT_ONCE)
        if items:
            ended = [opened[int(item)] for item in items if item.isdigit() and int(item) in opened]
            written = [await self._collected(line, stop) for line in ended]
            await self._write(parts, written, {}, also_closed=items)
            return True
        if stop is None and not batch.is_sure:
            return await self._submit(parts, list(opened.values()))
        room = min(self.home.window - len(opened), AT_ONCE)
        if stop is None and room > 0 and batch.next_line < batch.total:
            return await self._open(parts, room)
        if opened:
            left_ms = max(0, batch.expires_ms - await self.home.batches.now_ms())
            self.held.again_ms = min(IDLE_MS, left_ms) if stop is None else IDLE_MS
            return stop is not None and await self._cancel(parts, list(opened.values()), stop)
        if stop == "batch_expired" and batch.next_line < batch.total:
            await self._give_up(parts, stop)
            return True
        await self._keep({"status": "finalizing", "finalizing_ms": None})
        return True

    async def _stop(self) -> str | None:
        """Return the reason why no more lines are submitted, or None if there is none."""
        if self.batch.cancelling_ms is not None:
            return "batch_cancelled"
        is_late = await self.home.batches.now_ms() >= self.batch.expires_ms
        return "batch_expired" if is_late else None

    async def _open(self, parts: Parts, room: int) -> bool:
        """Note the next lines as open, then submit them. Returns False if the queue is full."""
        batch = self.batch
        opened, written = list[Open](), list[Written]()
        found = await self._next_lines(room)
        for (number, place), line in found:
            try:
                model = line.body.get("model")
                if model in (None, ""):
                    model = await self.home.client.only_model()
                model = model if isinstance(model, str) else ""
                job_id = await self.home.client.name_job(
                    model, f"{batch.id} {number}", batch.tenant
                )
                opened.append(Open(number, job_id, place))
            except PenstockError as error:
                if error.retryable:
                    raise
                identity = short_digest(f"{batch.id} {number}")
                written.append(Written(str(number), refused(identity, line, error.body())))
        fields = {"next_line": batch.next_line + len(found), "is_sure": 0}
        await self._write(parts, written, fields, {line.number: str(line) for line in opened})
        reach("batch.opened")
        return await self._submit(parts, opened)

    async def _submit(self, parts: Parts, lines: Sequence[Open]) -> bool:
        """Submit lines. Those that the queue has already make no second job.

        Returns False if the queue takes no more for now.
        """
        answers = await asyncio.gather(*(self._submitted(line) for line in lines))
        written = [answer for answer in answers if isinstance(answer, Written)]
        full = [answer for answer in answers if isinstance(answer, Unavailable)]
        await self._write(parts, written, {} if full else {"is_sure": 1})
        if full:
            self.held.again_ms = max(1000, *(error.retry_after_ms or 0 for error in full))
        reach("batch.submitted")
        return not full

    async def _line(self, line: Open) -> BatchLine:
        path = await self._bytes_of_input()
        size = line.place.length
        return await self.home.client.off_loop.run(
            self.batch.tenant, size, line_at, path, line.place
        )

    async def _form(self, line: Open, asked: BatchLine) -> AnswerContext | PoolingContext:
        """Return the job that a line asks for. Raises InvalidJob."""
        caller = Caller(self.batch.tenant)
        asked = asked.with_model(await self.home.client.model_of(line.job_id))
        size = line.place.length
        return await self.home.client.off_loop.run(
            caller.tenant, size, form_of, line.job_id, caller, asked
        )

    async def _submitted(self, line: Open) -> Written | Unavailable | None:
        asked = await self._line(line)
        try:
            job = (await self._form(line, asked)).job
            note = Note(batch=self.batch.id, line=line.number)
            await self.home.client.submit(self._limited(job), self.batch.account, note.dump())
        except Unavailable as error:
            return error
        except PenstockError as error:
            return Written(str(line.number), refused(line.job_id, asked, error.body()))
        reach("batch.line")
        return None

    def _limited(self, job: Job) -> Job:
        """Return the job with a batch's time limit.

        It is the whole window and not what is left of it: the job must be the same at
        every try, or the queue would take it for another one.
        """
        timeout_ms = min(job.timeout_ms or 2**53, self.batch.asked.window_s * 1000)
        return job.model_copy(update={"timeout_ms": timeout_ms})

    async def _collected(self, line: Open, stop: str | None) -> Written:
        """Return the answer of a line whose job has ended."""
        asked = await self._line(line)
        item, tenant = str(line.number), self.batch.tenant
        try:
            result = await self.home.client.result(line.job_id, wait=False, tenant=tenant)
            form = await self._form(line, asked)
        except PenstockError as error:
            if error.retryable:
                raise
            return Written(item, refused(line.job_id, asked, error.body()))
        assert result is not None  # the note says that it ended
        if result.state == "succeeded":
            num_scored = sum(len(choice.prompt_logprobs or ()) for choice in result.choices)
            num_tokens = result.usage.completion_tokens
            num_bytes = form.job.answer_bytes(num_tokens, num_scored) // 8
            text = await self.home.client.off_loop.run(
                tenant, num_bytes, answered, line.job_id, asked, form, result
            )
            return Written(item, text, is_good=True, usage=result.usage)
        return self._failed(line, asked, result, stop)

    def _failed(self, line: Open, asked: BatchLine, result: Result, stop: str | None) -> Written:
        if stop is not None and result.state in ("cancelled", "expired"):
            return self._abandoned(line, asked, stop)
        assert result.error is not None
        text = refused(line.job_id, asked, result.error)
        return Written(str(line.number), text, usage=result.usage)

    def _abandoned(self, line: Open, asked: BatchLine, stop: str) -> Written:
        text = abandoned(line.job_id, asked, stop, REASONS[stop])
        return Written(str(line.number), text, is_abandoned=True)

    async def _cancel(self, parts: Parts, lines: Sequence[Open], stop: str) -> bool:
        """Cancel the jobs of open lines, and write those that the queue never got as abandoned.

        The others are written when their jobs have ended. Returns whether any line was written.
        """
        written = list[Written]()
        for line in lines:
            try:
                await self.home.client.cancel(line.job_id, self.batch.tenant)
            except (JobNotFound, JobGone):
                written.append(self._abandoned(line, await self._line(line), stop))
        await self._write(parts, written, {})
        return bool(written)

    async def _give_up(self, parts: Parts, stop: str) -> None:
        """Write the next lines, which were never submitted, as abandoned."""
        batch = self.batch
        written, found = [], await self._next_lines(16 * AT_ONCE)
        for (number, place), asked in found:
            line = Open(number, short_digest(f"{batch.id} {number}"), place)
            written.append(self._abandoned(line, asked, stop))
        await self._write(parts, written, {"next_line": batch.next_line + len(found)})

    async def _next_lines(self, most: int) -> list[tuple[PlacedLine, BatchLine]]:
        """Return the lines whose turn is next, with their models alone of their bodies."""
        batch, path = self.batch, await self._input()

        def read() -> list[tuple[PlacedLine, BatchLine]]:
            if not self._order.exists():  # it was lost, and comes out the same again
                write_order(path, self._order, batch.is_grouped)
            turns = read_order(self._order, batch.next_line, most)
            return list(zip(turns, line_heads(path, [each.place for each in turns]), strict=True))

        return await asyncio.to_thread(read)

    @property
    def _order(self) -> Path:
        return part_path(self.home.files.folder, self.batch.id, "order")

    async def _write(
        self,
        parts: Parts,
        written: Sequence[Written],
        fields: Mapping[str, str | int | None],
        opened: Mapping[int, str] | None = None,
        also_closed: Sequence[str] = (),
    ) -> None:
        """Write answers to disk, then what follows from them to Redis, then delete their jobs."""
        batch = self.batch
        lengths: dict[str, int] = {}
        if written:
            lengths = await asyncio.to_thread(parts.append, written)
            reach("batch.written")
        num_good = sum(each.is_good for each in written)
        counted = {
            "completed": batch.completed + num_good,
            "failed": batch.failed + len(written) - num_good,
            "abandoned": batch.abandoned + sum(each.is_abandoned for each in written),
            "prompt_tokens": batch.prompt_tokens + sum(w.usage.prompt_tokens for w in written),
            "cached_tokens": batch.cached_tokens + sum(w.usage.cached_tokens for w in written),
            "completion_tokens": batch.completion_tokens
            + sum(w.usage.completion_tokens for w in written),
        }
        closed = {*also_closed, *(each.item for each in written)}
        forgotten = await self._jobs_of(closed)
        await self._keep({**fields, **lengths, **counted}, opened, list(closed))
        reach("batch.kept")
        for job_id in forgotten:
            with suppress(JobNotFound, JobGone):
                await self.home.client.delete(job_id, batch.tenant)

    async def _jobs_of(self, items: set[str]) -> list[str]:
        texts = await self.home.batches.open_lines(self.batch.id) if items else {}
        return [text.split()[0] for number, text in texts.items() if str(number) in items]

    async def _finalize(self) -> None:
        """Make files of the parts, and end the batch. Each step may be repeated."""
        batch, folder = self.batch, self.home.files.folder
        fields: dict[str, str | int | None] = {"ended_ms": None}
        with closing(folder, batch.id) as is_ours:
            if not is_ours:
                self.held.again_ms = 1000
                return
            for kind, field, length in (
                ("output", "output_file_id", batch.output_bytes),
                ("errors", "error_file_id", batch.errors_bytes),
            ):
                if length:
                    record = await self._record(kind, length)
                    await self.home.files.add_output(part_path(folder, batch.id, kind), record)
                    fields[field] = record.id
            reach("batch.filed")
            is_cut = "expired" if batch.abandoned else "completed"
            fields["status"] = "cancelled" if batch.cancelling_ms is not None else is_cut
            await self._keep(fields)

    async def _record(self, kind: str, length: int) -> FileRecord:
        batch, now_s = self.batch, await self.home.files.now_s()
        asked = batch.asked.output_expires_after
        return FileRecord(
            id=f"file-{short_digest(f'{batch.id} {kind}')}",
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=length,
            created_s=now_s,
            expires_s=now_s + self.home.files.kept_s(asked.seconds if asked else None),
        )

    async def _input(self) -> Path:
        await self.home.files.get(self.batch.tenant, self.batch.asked.input_file_id)
        return await self._bytes_of_input()

    async def _bytes_of_input(self) -> Path:
        files, batch = self.home.files, self.batch
        copy = part_path(files.folder, batch.id, "input")
        return await files.storage.local(batch.asked.input_file_id, copy)

    async def _keep(
        self,
        fields: Mapping[str, str | int | None],
        opened: Mapping[int, str] | None = None,
        closed: Sequence[str] = (),
    ) -> None:
        await self.home.batches.keep(self.batch.id, self.turn, fields, opened, closed)
        batch = await self.home.batches.find(self.batch.id)
        assert batch is not None
        self.batch = batch


def file_error(error: Exception) -> dict[str, JsonValue]:
    """Return what a batch tells of a file that could not be read or written."""
    ours = isinstance(error, PenstockError)
    return {
        "code": error.code if isinstance(error, PenstockError) else "file_not_found",
        "message": str(error) if ours else "the input file was deleted",
        "line": None,
        "param": None,
    }
