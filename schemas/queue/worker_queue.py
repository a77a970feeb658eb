"""The queue of one lane for its workers (a consumer group): claim, start, log, end, hand back.

Each transition is one script, as in `queue`, and each call may be repeated.
"""

import asyncio
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from penstock.schemas.delivery import (
    Commit,
    Ending,
    Entry,
    HeldRows,
    JobSignal,
    OutOfBudget,
    Started,
)
from penstock.schemas.errors import AnswerTooLarge, InvalidJob
from penstock.schemas.event import EVENT, Delta, Done, Failed
from penstock.schemas.job import Job, QueueClass
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.kv_events import BlockBatch
from penstock.schemas.queue.queue import CLASS, MAX_JOBS_A_CALL, Queue
from penstock.schemas.redis.link import Word
from penstock.schemas.redis.servers import Redis
from penstock.schemas.result import MAX_RESULT_BYTES, fold

MAX_BLOCK_MS = 2000  # below a link's time-out
BlocksTold = Literal["ok", "behind", "lost"]
BLOCK_REPLIES: Final[dict[bytes, BlocksTold]] = {b"ok": "ok", b"behind": "behind", b"lost": "lost"}
SIGNALS = {signal.value.encode(): signal for signal in JobSignal}


class WorkerQueue(Queue):
    """One lane. Workers register, read, start, commit, beat, finish and release.

    `worker` is an incarnation: a name that is never used again once its lease was lost.
    """

    def __init__(
        self, redis: Redis, lane: Lane, lease_ms: int = 5000, orphan_grace_ms: int = 10_000
    ) -> None:
        super().__init__(redis, lane, orphan_grace_ms)
        self.lease_ms = lease_ms
        self._ticket = secrets.token_hex(8)
        self._idle: tuple[bytes, int] | None = None  # the last read's: newest news, ms until due
        self.orders: Sequence[str] = ()  # as of the latest beat: what `Queue.tell` said, and when
        self.must_be_empty = False  # by the latest read: hand back all that is held, read alone

    async def register(self, worker: str, card: WorkerCard) -> None:
        """Begin a lease, or change the card of a running one."""
        await self._run("workers/register", worker, self.lease_ms, card.dump())

    async def unregister(self, worker: str, crashed: bool = False) -> None:
        """End a lease at once. Jobs that the worker still held go to others.

        `crashed` says that it died of something it was working on; see `reap.lua` for the blame.
        """
        await self._run("workers/unregister", worker, "crashed" if crashed else "left")
        while await self.reap():
            pass

    async def read(
        self,
        worker: str,
        count: int,
        alone: bool = False,
        down_to: QueueClass | None = None,
        step_us: int | None = None,
        batch: int | None = None,
        held_rows: Mapping[QueueClass, HeldRows] | None = None,
    ) -> list[Entry] | None:
        """Claim at most `count` jobs: handed-back ones first, then text, high, normal, batch.

        Return None where the lease was lost; the worker comes back under a new incarnation. Every
        entry must be started, or released, by this worker. Make one call at a time, and call
        `news` after an empty one.

        alone    the worker holds nothing, and takes nothing beside a suspect if it gets one
        down_to  claim only what waits in this class and the higher ones
        step_us  how long a step of the worker takes, 0 if it does not know; it then leaves other
                 workers with capacity their share. None means that it leaves them nothing
        batch    how many of the jobs may be of the class `batch`, beside handed-back ones; None:
                 all
        held_rows  the rows of a class, where one gives way to a tenant that has less than its share
        """
        cost = "" if step_us is None else step_us
        reply = await self._run(
            "workers/read",
            worker,
            self._ticket,
            count,
            int(alone),
            down_to or "",
            cost,
            count if batch is None else batch,
            json.dumps(held_rows) if held_rows else "",
        )
        self._idle = (reply[1], int(reply[2])) if reply[0] == b"idle" else None
        self.must_be_empty = reply[0] == b"empty"
        # A repeat under the old ticket would have had the same answer.
        self._ticket = secrets.token_hex(8)
        if reply[0] == b"lost":
            return None
        texts = [text.decode() for text in reply[1:]] if reply[0] == b"entries" else []
        return [Entry(*texts[at : at + 3]) for at in range(0, len(texts), 3)]

    async def news(self, most_ms: int) -> None:
        """Wait until there may be jobs that the last read did not find, at most `most_ms`.

        It claims nothing, since other workers wait too.
        """
        if self._idle is None:
            return
        newest, due_ms = self._idle
        most_ms = min(most_ms, MAX_BLOCK_MS)
        if 0 <= due_ms < most_ms:
            most_ms = due_ms + 1
        await self.connection.call(
            "XREAD", "COUNT", 1, "BLOCK", most_ms, "STREAMS", self.lane.news, newest
        )

    async def start(self, worker: str, entry: Entry) -> Started | None:
        """Start a claimed job under a new epoch. Return None where nothing is left to do for it.

        A job that ended, was cancelled or is out of time is settled by this call. So is a job whose
        payload cannot be read, as Failed. A started job is the worker's until it finishes or
        releases it.
        """
        reply = await self._run("workers/start", worker, entry.ready, entry.entry_id, entry.job_id)
        if reply[0] != b"started":
            return None
        epoch, left_ms, waited_ms = int(reply[1]), int(reply[2]), int(reply[3])
        priority_class = CLASS.validate_python(reply[4].decode())
        turn, budget_left, reset_at, trial, queued_ms, first_token_ms = map(int, reply[5:11])
        weight, request, *lines = reply[11:]
        events = [EVENT.validate_json(text) for text in lines]
        log = [event for event in events if isinstance(event, Delta)]
        try:
            job = Job.model_validate_json(request)
        except ValidationError as error:
            await self._refuse(worker, entry.job_id, epoch, log, _error_text(error))
            return None
        if (job.job_id, job.model) != (entry.job_id, self.lane.model):
            sentence = (
                f"job: {job.job_id!r} for {job.model!r} lies in the place of {entry.job_id!r}"
            )
            await self._refuse(worker, entry.job_id, epoch, log, sentence)
            return None
        return Started(
            job=job,
            epoch=epoch,
            log=log,
            left_ms=left_ms if left_ms >= 0 else None,
            waited_ms=waited_ms,
            priority_class=priority_class,
            turn=turn,
            budget_left=budget_left if budget_left >= 0 else None,
            budget_reset_at=reset_at or None,
            trial=trial if trial >= 0 else None,
            queued_ms=queued_ms,
            first_token_ms=first_token_ms if first_token_ms >= 0 else None,
            weight=float(weight),
        )

    async def commit(self, worker: str, commits: Sequence[Commit]) -> dict[str, JobSignal]:
        """Log and publish the deltas of a step, renew the lease, and return each job's signal."""
        signals: dict[str, JobSignal] = {}
        calls = [
            self._commit(worker, commits[at : at + MAX_JOBS_A_CALL])
            for at in range(0, len(commits), MAX_JOBS_A_CALL)
        ]
        for part in await asyncio.gather(*calls):
            signals |= part
        return signals

    async def beat(
        self, worker: str, stats: dict[str, JsonValue] | None = None
    ) -> dict[str, JobSignal] | None:
        """Renew the lease, and return signals of held jobs that must stop; None if it is lost."""
        reply = await self._run(
            "workers/beat", worker, self.lease_ms, json.dumps(stats) if stats else ""
        )
        if reply[0] == b"lost":
            return None
        self.orders = [text.decode() for text in reply[1:3] if text]
        texts = [text.decode() for text in reply[3:]]
        return {
            job_id: JobSignal(signal)
            for job_id, signal in zip(texts[::2], texts[1::2], strict=True)
        }

    async def finish(self, worker: str, ending: Ending) -> bool:
        """End a job: write its last deltas, its end event and its result.

        Return False where the job was not the worker's; a repeated call returns True again. The
        log is deleted a minute later, the result after its time.
        Raises OutOfBudget where it must end earlier; the deltas up to there are logged or may be.
        Raises AnswerTooLarge where a job would succeed with more than a result may hold. Where
        such a job fails, its choices are not kept.
        """
        job = ending.job
        tail, usage = ending.deltas[ending.num_committed :], ending.end.usage
        reply = await self._run(
            "workers/finish",
            worker,
            self.lease_ms,
            job.job_id,
            ending.epoch,
            ending.end.state,
            ending.end.dump(),
            ending.end.position,
            _result(ending),
            _prompt(usage.prompt_tokens or None, usage.cached_tokens),
            max(0, usage.completion_tokens - ending.end.position),
            len(tail),
            *_event_args(tail),
        )
        if reply[0] == JobSignal.BUDGET.encode():
            raise OutOfBudget(int(reply[1]))
        return JobSignal(reply[0].decode()) is not JobSignal.FENCE

    async def release(self, worker: str, job_ids: Iterable[str]) -> int:
        """Hand claimed or started jobs back, and return how many. They go on before all others."""
        ids, count = list(job_ids), 0
        for at in range(0, len(ids), MAX_JOBS_A_CALL):
            batch = ids[at : at + MAX_JOBS_A_CALL]
            count += int((await self._run("workers/release", worker, *batch))[0])
        return count

    async def held(self, worker: str, idle_ms: int) -> set[str]:
        """Return jobs that the worker claimed at least `idle_ms` ago, known to it or not."""
        return {job_id.decode() for job_id in await self._run("workers/held", worker, idle_ms)}

    async def tell_blocks(
        self, worker: str, seq: int, batch: BlockBatch, block_size: int, most_entries: int
    ) -> BlocksTold:
        """Tell how the worker's prefix cache changed, as entry `seq` of its stream.

        An empty batch only keeps what was told for as long as the lease; `seq` is then that of the
        last entry. Return "behind" where Redis does not have the entry before this one, so that all
        must be told anew, and "lost" where the worker has no lease.
        """
        reply = await self._run(
            "workers/kv_events",
            worker,
            seq,
            "1" if batch.begins else "",
            most_entries,
            "" if batch.is_empty else batch.dump(block_size),
            len(batch.removals),
            *batch.removals,
            *batch.state(),
        )
        return BLOCK_REPLIES[reply[0]]

    async def _commit(self, worker: str, commits: Sequence[Commit]) -> dict[str, JobSignal]:
        args: list[Word] = []
        for commit in commits:
            args += _commit_args(commit)
        reply = await self._run("workers/commit", worker, self.lease_ms, len(commits), *args)
        ids = [commit.job_id for commit in commits]
        return dict(zip(ids, [SIGNALS[signal] for signal in reply], strict=True))

    async def _refuse(
        self, worker: str, job_id: str, epoch: int, log: list[Delta], sentence: str
    ) -> None:
        """End a job whose payload no worker could run."""
        position = log[-1].end if log else 0
        end = Failed(position=position, state="failed", error=InvalidJob(sentence).body())
        empty = Job.model_construct(job_id=job_id, model=self.lane.model, prompts=[])
        await self.finish(worker, Ending(empty, epoch, log, len(log), end))


def _result(ending: Ending) -> bytes:
    job, end = ending.job, ending.end
    result = fold(job.job_id, job.model, job.num_choices, ending.deltas, end)
    text = result.dump().encode()
    if len(text) <= MAX_RESULT_BYTES:
        return text
    if isinstance(end, Done):
        raise AnswerTooLarge(
            f"the answer takes {len(text)} bytes, at most {MAX_RESULT_BYTES} are kept; ask for"
            " fewer tokens, choices or logprobs"
        )
    return result.without_choices(end).dump().encode()


def _event_args(deltas: Sequence[Delta]) -> list[Word]:
    args: list[Word] = []
    for delta in deltas:
        args += (delta.position, len(delta.token_ids), delta.dump())
    return args


def _commit_args(commit: Commit) -> list[Word]:
    prompt = _prompt(commit.num_prompt, commit.num_cached)
    return [commit.job_id, commit.epoch, prompt, len(commit.deltas), *_event_args(commit.deltas)]


def _prompt(num_prompt: int | None, num_cached: int) -> str:
    return "" if num_prompt is None else f"{num_prompt}:{num_cached}"


def _error_text(error: ValidationError) -> str:
    """Return the first error of a payload: field and limit, and nothing of what it held."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "job"
    return f"{place}: {first['msg']}"
