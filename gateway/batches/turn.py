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
from penstock.gateway.batches.batches import END_STATUSES, Batches, BatchRecord
from penstock.gateway.batches.lines import (
    BatchLine,
    Open,
    abandoned_line,
    answer_line,
    form_of,
    line_at,
    line_errors,
    line_heads,
    refused_line,
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
    lease: Held
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
                    self.lease.again_ms = 1000
                    return
                while self.batch.status == "in_progress" and await self._step(parts):
                    if time.monotonic() > until:
                        self.lease.again_ms = 0
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
        if batch.status not in END_STATUSES or batch.ended_ms is None:
            return
        for kind in ("output", "errors", "order", "input"):
            part_path(self.home.files.folder, batch.id, kind).unlink(missing_ok=True)
        kind, fields = f"batch.{batch.status}", {"status": batch.status}
        occurrence = Occurrence(batch.tenant, kind, batch.id, batch.ended_ms, fields)
        await self.home.webhooks.tell(occurrence, batch.asked.webhook or "")
        self.lease.again_ms = -1

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
            start = {"status": "in_progress", "in_progress_ms": None}
            await self._keep({**start, "total": total, "is_grouped": 1})

    async def _step(self, parts: Parts) -> bool:
        """Collect answers, or else submit lines.

        Returns False when there is nothing to do until a job ends or time has passed.
        """
        batch, stop = self.batch, await self._stop()
        texts = await self.home.batches.open_lines(batch.id)
        open_lines = {number: Open.read(number, text) for number, text in texts.items()}
        items = await self.home.batches.due.items(batch.id, AT_ONCE)
        if items:
            lines = [
                open_lines[int(item)]
                for item in items
                if item.isdigit() and int(item) in open_lines
            ]
            answers = [await self._collect(line, stop) for line in lines]
            await self._write(parts, answers, {}, other_items=items)
            return True
        if stop is None and not batch.is_sure:
            return await self._submit(parts, list(open_lines.values()))
        room = min(self.home.window - len(open_lines), AT_ONCE)
        if stop is None and room > 0 and batch.next_line < batch.total:
            return await self._open(parts, room)
        if open_lines:
            left_ms = max(0, batch.expires_ms - await self.home.batches.now_ms())
            self.lease.again_ms = min(IDLE_MS, left_ms) if stop is None else IDLE_MS
            return stop is not None and await self._cancel(parts, list(open_lines.values()), stop)
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
        open_lines, answers = list[Open](), list[Written]()
        lines = await self._next_lines(room)
        for (number, place), line in lines:
            try:
                model = line.body.get("model")
                if model in (None, ""):
                    model = await self.home.client.only_model()
                model = model if isinstance(model, str) else ""
                job_id = await self.home.client.name_job(
                    model, f"{batch.id} {number}", batch.tenant
                )
                open_lines.append(Open(number, job_id, place))
            except PenstockError as error:
                if error.retryable:
                    raise
                identity = short_digest(f"{batch.id} {number}")
                answers.append(Written(str(number), refused_line(identity, line, error.body())))
        fields = {"next_line": batch.next_line + len(lines), "is_sure": 0}
        await self._write(parts, answers, fields, {line.number: str(line) for line in open_lines})
        reach("batch.opened")
        return await self._submit(parts, open_lines)

    async def _submit(self, parts: Parts, lines: Sequence[Open]) -> bool:
        """Submit lines. Those that the queue has already make no second job.

        Returns False if the queue takes no more for now.
        """
        replies = await asyncio.gather(*(self._submit_line(line) for line in lines))
        answers = [answer for answer in replies if isinstance(answer, Written)]
        full = [answer for answer in replies if isinstance(answer, Unavailable)]
        await self._write(parts, answers, {} if full else {"is_sure": 1})
        if full:
            self.lease.again_ms = max(1000, *(error.retry_after_ms or 0 for error in full))
        reach("batch.submitted")
        return not full

    async def _line(self, line: Open) -> BatchLine:
        path = await self._bytes_of_input()
        size = line.place.length
        return await self.home.client.off_loop.run(
            self.batch.tenant, size, line_at, path, line.place
        )

    async def _form(self, line: Open, request: BatchLine) -> AnswerContext | PoolingContext:
        """Return the job that a line asks for. Raises InvalidJob."""
        caller = Caller(self.batch.tenant)
        request = request.with_model(await self.home.client.model_of(line.job_id))
        size = line.place.length
        return await self.home.client.off_loop.run(
            caller.tenant, size, form_of, line.job_id, caller, request
        )

    async def _submit_line(self, line: Open) -> Written | Unavailable | None:
        request = await self._line(line)
        try:
            job = (await self._form(line, request)).job
            note = Note(batch=self.batch.id, line=line.number)
            await self.home.client.submit(self._with_limit(job), self.batch.account, note.dump())
        except Unavailable as error:
            return error
        except PenstockError as error:
            return Written(str(line.number), refused_line(line.job_id, request, error.body()))
        reach("batch.line")
        return None

    def _with_limit(self, job: Job) -> Job:
        """Return the job with a batch's time limit.

        It is the whole window and not what is left of it: the job must be the same at
        every try, or the queue would take it for another one.
        """
        timeout_ms = min(job.timeout_ms or 2**53, self.batch.asked.window_s * 1000)
        return job.model_copy(update={"timeout_ms": timeout_ms})

    async def _collect(self, line: Open, stop: str | None) -> Written:
        """Return the answer of a line whose job has ended."""
        request = await self._line(line)
        item, tenant = str(line.number), self.batch.tenant
        try:
            result = await self.home.client.result(line.job_id, wait=False, tenant=tenant)
            form = await self._form(line, request)
        except PenstockError as error:
            if error.retryable:
                raise
            return Written(item, refused_line(line.job_id, request, error.body()))
        assert result is not None  # the note says that it ended
        if result.state == "succeeded":
            num_scored = sum(len(choice.prompt_logprobs or ()) for choice in result.choices)
            num_tokens = result.usage.completion_tokens
            num_bytes = form.job.answer_bytes(num_tokens, num_scored) // 8
            text = await self.home.client.off_loop.run(
                tenant, num_bytes, answer_line, line.job_id, request, form, result
            )
            return Written(item, text, is_good=True, usage=result.usage)
        return self._failed(line, request, result, stop)

    def _failed(self, line: Open, request: BatchLine, result: Result, stop: str | None) -> Written:
        if stop is not None and result.state in ("cancelled", "expired"):
            return self._abandoned(line, request, stop)
        assert result.error is not None
        text = refused_line(line.job_id, request, result.error)
        return Written(str(line.number), text, usage=result.usage)

    def _abandoned(self, line: Open, request: BatchLine, stop: str) -> Written:
        text = abandoned_line(line.job_id, request, stop, REASONS[stop])
        return Written(str(line.number), text, is_abandoned=True)

    async def _cancel(self, parts: Parts, lines: Sequence[Open], stop: str) -> bool:
        """Cancel the jobs of open lines, and write those that the queue never got as abandoned.

        The others are written when their jobs have ended. Returns whether any line was written.
        """
        answers = list[Written]()
        for line in lines:
            try:
                await self.home.client.cancel(line.job_id, self.batch.tenant)
            except (JobNotFound, JobGone):
                answers.append(self._abandoned(line, await self._line(line), stop))
        await self._write(parts, answers, {})
        return bool(answers)

    async def _give_up(self, parts: Parts, stop: str) -> None:
        """Write the next lines, which were never submitted, as abandoned."""
        batch = self.batch
        answers, lines = [], await self._next_lines(16 * AT_ONCE)
        for (number, place), request in lines:
            line = Open(number, short_digest(f"{batch.id} {number}"), place)
            answers.append(self._abandoned(line, request, stop))
        await self._write(parts, answers, {"next_line": batch.next_line + len(lines)})

    async def _next_lines(self, most: int) -> list[tuple[PlacedLine, BatchLine]]:
        """Return the lines whose turn is next, with their models alone of their bodies."""
        batch, path = self.batch, await self._input()

        def read() -> list[tuple[PlacedLine, BatchLine]]:
            if not self._order.exists():  # it was lost, and comes out the same again
                write_order(path, self._order, batch.is_grouped)
            entries = read_order(self._order, batch.next_line, most)
            heads = line_heads(path, [entry.place for entry in entries])
            return list(zip(entries, heads, strict=True))

        return await asyncio.to_thread(read)

    @property
    def _order(self) -> Path:
        return part_path(self.home.files.folder, self.batch.id, "order")

    async def _write(
        self,
        parts: Parts,
        answers: Sequence[Written],
        fields: Mapping[str, str | int | None],
        new_lines: Mapping[int, str] | None = None,
        other_items: Sequence[str] = (),
    ) -> None:
        """Write answers to disk, then what follows from them to Redis, then delete their jobs."""
        batch = self.batch
        lengths: dict[str, int] = {}
        if answers:
            lengths = await asyncio.to_thread(parts.append, answers)
            reach("batch.written")
        num_good = sum(answer.is_good for answer in answers)
        counts = {
            "completed": batch.completed + num_good,
            "failed": batch.failed + len(answers) - num_good,
            "abandoned": batch.abandoned + sum(answer.is_abandoned for answer in answers),
            "prompt_tokens": batch.prompt_tokens
            + sum(answer.usage.prompt_tokens for answer in answers),
            "cached_tokens": batch.cached_tokens
            + sum(answer.usage.cached_tokens for answer in answers),
            "completion_tokens": batch.completion_tokens
            + sum(answer.usage.completion_tokens for answer in answers),
        }
        done_items = {*other_items, *(answer.item for answer in answers)}
        job_ids = await self._jobs_of(done_items)
        await self._keep({**fields, **lengths, **counts}, new_lines, list(done_items))
        reach("batch.kept")
        for job_id in job_ids:
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
                self.lease.again_ms = 1000
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
        expiry = batch.asked.output_expires_after
        return FileRecord(
            id=f"file-{short_digest(f'{batch.id} {kind}')}",
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=length,
            created_s=now_s,
            expires_s=now_s + self.home.files.kept_s(expiry.seconds if expiry else None),
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
        new_lines: Mapping[int, str] | None = None,
        done_items: Sequence[str] = (),
    ) -> None:
        await self.home.batches.keep(self.batch.id, self.turn, fields, new_lines, done_items)
        batch = await self.home.batches.find(self.batch.id)
        assert batch is not None
        self.batch = batch


def file_error(error: Exception) -> dict[str, JsonValue]:
    """Return what a batch tells of a file that could not be read or written."""
    is_ours = isinstance(error, PenstockError)
    return {
        "code": error.code if isinstance(error, PenstockError) else "file_not_found",
        "message": str(error) if is_ours else "the input file was deleted",
        "line": None,
        "param": None,
    }
