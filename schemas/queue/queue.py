"""The queue of one lane, as callers, readers, operators and housekeeping use it.

`worker_queue` adds the calls of workers. Every transition of a job is one Lua script, atomic and
idempotent, and these two modules alone run it. So each call here may be repeated after an ambiguous
failure (the connection does so by itself). A lost race is an answer, never an exception. Each call
raises QueueUnreachable when Redis cannot be asked, QueueFull when Redis is out of memory, and the
errors that its docstring names.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pydantic import JsonValue, TypeAdapter

from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import (
    AccountStatus,
    DeadLetter,
    JobStatus,
    LaneStatus,
    Moment,
    Outcome,
    Page,
    Rates,
    Reason,
    Submission,
    Total,
    WorkerStatus,
)
from penstock.schemas.errors import InvalidJob, JobGone, JobNotFound, NotServed
from penstock.schemas.event import EVENT, Delta, Event, Result, State
from penstock.schemas.job import Job, QueueClass
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard, WorkerOrder
from penstock.schemas.process.crash_points import reach
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.link import Word
from penstock.schemas.redis.servers import Redis
from penstock.schemas.result import fold, read_result

MAX_ACCOUNTS_A_CALL = 1000
MAX_JOBS_A_CALL = 64  # bounds how long one script stalls Redis
KEYS_A_SEARCH = 1000
MAX_CALLS_A_SWEEP = 256  # half a second's work for Redis, once a second
PAGE = 512  # most events that one attach returns
PAGE_BYTES = 128 * 1024  # the page ends with these, after two events at the least
ON_DISK = b"on disk"  # in place of what a job asks, where a gateway's files are
INLINE_BYTES = 256 * 1024  # takes a few milliseconds to read
T = TypeVar("T")
TOTALS: tuple[Total, ...] = ("crashed", "lapsed", "reaped", "requeued", "buried")
CLASSES: tuple[QueueClass, ...] = ("text", "high", "normal", "batch")
STATE: TypeAdapter[State] = TypeAdapter(State)
CLASS: TypeAdapter[QueueClass] = TypeAdapter(QueueClass)
REASON: TypeAdapter[Reason] = TypeAdapter(Reason)
STATS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


class LaneUse(NamedTuple):
    """The things of a lane that somebody uses, or may want to see."""

    num_workers: int  # workers with a lease, or with a lapsed one that was not reaped
    num_jobs: int  # jobs that have not ended
    num_to_hand_on: int  # ended jobs that a webhook or a batch asks about
    num_dead_letters: int

    @property
    def is_held(self) -> bool:
        return bool(self.num_workers or self.num_jobs or self.num_to_hand_on)


class Queue:
    """One lane. Callers enqueue, readers attach, operators handle dead letters; all may sweep."""

    def __init__(self, redis: Redis, lane: Lane, orphan_grace_ms: int = 10_000) -> None:
        self.lane = lane
        self.orphan_grace_ms = orphan_grace_ms
        self.connection = Connection(redis)

    # For callers that submit jobs.

    async def enqueue(
        self,
        job: Job,
        reply_to: str | None,
        digest: str | None = None,
        dump: tuple[str, str] | None = None,
        max_queued: int = 10_000,
        max_queued_tokens: int | None = None,
        result_ttl_s: int = 3600,
        account: Account | None = None,
        note: str | None = None,
        remember_s: int = 0,
        keeps_request: bool = False,
        is_shared: bool = False,
    ) -> Submission:
        """Submit a job, and return whether it was accepted or why not. Raises InvalidJob.

        A foreground job is refused where no worker's lease runs.

        reply_to      the pub/sub channel of its events; None means the job's own
        digest        stands for the body: the same id with the same digest is the same job,
                      submitted again; None means a digest of what the job asks
        dump          what `job.dump_and_digest` returns, where the caller made it already
        result_ttl_s  how long the result is kept after the end
        account       the job counts for it, under the limits that it has now; None means for
                      the tenant, without limits
        note          is put in the lane's outbox when the job ends
        remember_s    how long the job's id is known after the end, at least twice result_ttl_s
        keeps_request  the job is kept as long as its result
        is_shared     a job of the tenant with the same digest, which has not ended, is joined
        """
        text, own_digest = dump or job.dump_and_digest()
        options: dict[str, object] = {
            "tenant": job.tenant,
            "class": job.priority_class,
            "background": job.background,
            "prompt_tokens": job.guess_prompt_tokens(len(text)),
            "completion_tokens": job.guess_completion_tokens(),
            "max_queued": max_queued,
            "ttl_s": result_ttl_s,
        }
        for name in ("timeout_ms", "queue_timeout_ms", "not_before_ms", "delay_ms"):
            if (value := getattr(job, name)) is not None:
                options[name] = value
        if job.priority:
            options["priority"] = job.priority
        if job.over_limit != "refuse":
            options["over_limit"] = job.over_limit
        if job.metadata:
            options["metadata"] = job.metadata
        if max_queued_tokens is not None:
            options["max_queued_tokens"] = max_queued_tokens
        if remember_s:
            options["remember_s"] = remember_s
        if account is not None:
            options["account"] = account.model_dump(exclude_none=True)
        if (affinity := job.affinity) is not None:
            options["affinity"] = affinity
        if note is not None:
            options["note"] = note
        if keeps_request:
            options["keeps_request"] = True
        if is_shared:
            options["shares"] = own_digest
        reply = await self._run(
            "jobs/enqueue",
            job.job_id,
            own_digest if digest is None else digest,
            text,
            reply_to or self.lane.channel(job.job_id),
            json.dumps(options),
        )
        outcome, num_queued, retry_ms, reason, created_ms = (item.decode() for item in reply)
        if outcome == "invalid":
            raise InvalidJob(f"job {job.job_id!r}: {reason}", "job_id")
        return Submission(Outcome(outcome), int(num_queued), int(retry_ms), reason, int(created_ms))

    # For monitoring.

    async def workers(self) -> list[WorkerStatus]:
        """Return every worker that registered and was not reaped."""
        reply = await self._run("workers/list")
        return [
            WorkerStatus(
                worker=reply[at].decode(),
                lease_left_ms=int(reply[at + 1]),
                card=WorkerCard.model_validate_json(reply[at + 2] or b"{}"),
                stats=STATS.validate_json(reply[at + 3] or b"{}"),
            )
            for at in range(0, len(reply), 4)
        ]

    # Housekeeping, done by workers each second, and by `penstock housekeeping` behind them.

    async def reap(self) -> int:
        """Hand jobs of workers with a lapsed lease to others, at most 64. Return how many."""
        return int((await self._run("housekeeping/reap", MAX_JOBS_A_CALL))[0])

    async def next_lapse_ms(self) -> int | None:
        """Return the milliseconds until the first lease ends if not renewed; None if none runs."""
        left_ms = int((await self._run("housekeeping/lapse"))[0])
        return left_ms if left_ms >= 0 else None

    async def sweep(self) -> int:
        """End queued jobs that are out of time, and foreground jobs that nobody listens to.

        Return about how many jobs were looked at. What is left after MAX_CALLS_A_SWEEP waits for
        the next sweep: of many jobs the first may be due again before the last was looked at.
        """
        total = 0
        for _ in range(MAX_CALLS_A_SWEEP):
            reply = await self._run("housekeeping/sweep", self.orphan_grace_ms, MAX_JOBS_A_CALL)
            total += int(reply[0])
            if int(reply[0]) < MAX_JOBS_A_CALL:
                break
        return total

    async def revoke(self, accounts: Sequence[str]) -> int:
        """Cancel the jobs of accounts whose keys are revoked or expired. Return how many."""
        total = 0
        for at in range(0, len(accounts), MAX_ACCOUNTS_A_CALL):
            batch = accounts[at : at + MAX_ACCOUNTS_A_CALL]
            for _ in range(MAX_CALLS_A_SWEEP):
                reply = await self._run("housekeeping/revoke", MAX_JOBS_A_CALL, *batch)
                total += int(reply[0])
                if int(reply[0]) < MAX_JOBS_A_CALL:
                    break
        return total

    async def use(self) -> LaneUse:
        return LaneUse(*map(int, await self._run("housekeeping/forget", "look", 0)))

    async def keeps_jobs(self) -> bool:
        """Return whether any job's record is kept. It looks at every key of the server."""
        cursor: Word = "0"
        while True:
            cursor, count = await self._run("housekeeping/forget", cursor, KEYS_A_SEARCH)
            if int(count) or cursor == b"0":
                return bool(int(count))

    async def drop_lane(self) -> bool:
        """Drop what is left of a lane that nobody uses; return False where somebody does."""
        return (await self._run("housekeeping/forget", "drop", 0))[0] == b"dropped"

    async def counts(self) -> LaneStatus:
        reply, reasons, offset = list[str](), Counter[str](), 0
        while not reply or int(reply[19]) >= MAX_JOBS_A_CALL:
            reply = [item.decode() for item in await self._run("jobs/counts", offset)]
            reasons.update(dict(zip(reply[20::2], map(int, reply[21::2]), strict=True)))
            offset += int(reply[19])
        num_running, num_ended, interval_ms, num_handed_back, num_delayed = reply[:5]
        by_class = dict(zip(CLASSES, map(int, reply[5:9]), strict=True))
        return LaneStatus(
            num_queued=int(num_handed_back) + int(num_delayed) + sum(by_class.values()),
            num_running=int(num_running),
            num_ended=int(num_ended),
            interval_ms=float(interval_ms),
            by_class=by_class,
            num_delayed=int(num_delayed),
            num_handed_back=int(num_handed_back),
            num_queued_tokens=int(reply[15]),
            oldest_waiting_ms=int(reply[16]),
            is_wanted=reply[17] == "1",
            is_paused=reply[18] == "1",
            num_dead_letters=int(reply[9]),
            totals=dict(zip(TOTALS, map(int, reply[10:15]), strict=True)),
            by_reason=dict(reasons),
        )

    # For operators.

    async def tell(self, worker: str, order: WorkerOrder) -> bool:
        """Give a worker an order; return whether one has a lease under this name.

        Raises NotServed where its engine takes no such order.
        """
        answer = (await self._run("workers/tell", worker, order))[0]
        if answer == b"deaf":
            raise NotServed(f"worker {worker!r} has an engine of others, or is older: not {order}")
        return answer == b"ok"

    async def set_paused(self, is_paused: bool) -> None:
        """Let no job begin, or go on at another worker, until it is resumed; or resume it."""
        await self._run("jobs/pause", int(is_paused))

    async def dead_letters(self, most: int = 100) -> tuple[list[DeadLetter], int]:
        """Return the newest dead letters, newest first, and how many older ones were dropped."""
        num_dropped, *letters = await self._run("jobs/dead", "", most)
        return [DeadLetter.model_validate_json(text) for text in letters], int(num_dropped)

    async def dead_letter(self, job_id: str) -> tuple[DeadLetter, Job | None]:
        """Return a dead letter and its job, None if that was not kept. Raises JobNotFound."""
        _, *rest = await self._run("jobs/dead", job_id, 1)
        if not rest:
            raise JobNotFound(job_id)
        job = Job.model_validate_json(rest[1]) if rest[1] else None
        return DeadLetter.model_validate_json(rest[0]), job

    async def drop_dead(self, job_id: str) -> bool:
        """Drop a dead letter and its request. Return False when there was none."""
        return (await self._run("jobs/drop", job_id))[0] == b"1"

    async def requeue_dead(self, job_id: str) -> Submission:
        """Submit a dead job again, in the background, under an id that follows from its own.

        Its dead letter is dropped once the queue has the job. Repeated after a failure it is the
        same job. Raises JobNotFound, and JobGone when the request was kept no longer.
        """
        letter, job = await self.dead_letter(job_id)
        if job is None:
            raise JobGone(job_id)
        again = {"job_id": self.successor(job_id, letter.tenant), "background": True}
        job = job.model_copy(update={**again, "delay_ms": None, "not_before_ms": None})
        account = Account(name=f"dlq:{letter.tenant}")  # the tenant's accounts keep their limits
        submission = await self.enqueue(job, None, account=account)
        if submission.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            await self.drop_dead(job_id)
        return submission

    def successor(self, job_id: str, tenant: str) -> str:
        """Return the id under which a dead job is submitted again."""
        return self.lane.idempotent_job_id(tenant, f"dead:{job_id}")

    # For readers. A job of another tenant is not found.

    async def attach(self, tenant: str, job_id: str, channel: str, cursor: int) -> Page:
        """Add a reply channel to a job, and return its log after the cursor.

        There is no gap between this log and what is published on the channel.
        Raises JobNotFound, and JobGone when the result was kept no longer.
        """
        reply = await self._run("jobs/attach", tenant, job_id, channel, cursor, PAGE, PAGE_BYTES)
        state = _known(reply, job_id)
        if reply[1] == b"result":
            return Page(state, await _apart(_events_of_result, reply[2]), more=False)
        events = await _events(reply[2:])
        return Page(state, events, more=_is_full(reply[2:]))

    async def detach(self, job_id: str, channel: str) -> None:
        await self._run("jobs/detach", job_id, channel)

    async def cancel(self, tenant: str, job_id: str) -> JobStatus:
        """Cancel a job, and return its status. Raises JobNotFound.

        A queued job ends here, the worker of a running one is told, and an ended one is left alone.
        """
        _known(await self._run("jobs/cancel", tenant, job_id, 0), job_id)
        return await self.status(tenant, job_id)

    async def delete(self, tenant: str, job_id: str) -> bool:
        """Erase prompt, log and result; a running job is cancelled and erased as it stops.

        Returns whether what the job asked is on disk still. Raises JobNotFound.
        """
        reply = await self._run("jobs/cancel", tenant, job_id, 1)
        _known(reply, job_id)
        return reply[1:] == [ON_DISK]

    async def status(self, tenant: str, job_id: str) -> JobStatus:
        reply = await self._run("jobs/status", tenant, job_id)
        state = _known(reply, job_id)
        tokens, background, cancel, created_at, started_at, ended_at, deadline, owner = reply[1:9]
        priority_class, metadata, position, reason, eta_ms, history, resumes = (
            item.decode() for item in reply[9:]
        )
        return JobStatus(
            job_id=job_id,
            model=self.lane.model,
            state=state,
            num_tokens=int(tokens),
            background=background == b"1",
            cancelling=bool(cancel) and not ended_at,
            created_ms=int(created_at),
            started_ms=_int(started_at),
            ended_ms=_int(ended_at),
            deadline_ms=_int(deadline),
            worker=owner.decode() or None,
            priority_class=CLASS.validate_python(priority_class),
            position=_int(position),
            reason=REASON.validate_python(reason) if reason else None,
            eta_ms=_int(eta_ms),
            metadata=json.loads(metadata or "{}"),
            timeline=_timeline(int(created_at), history, _int(ended_at), state),
            resume="text" if resumes else "tokens",
        )

    async def request(self, tenant: str, job_id: str) -> bytes:
        """Return a job as it was submitted, as JSON, or `ON_DISK`.

        Raises JobNotFound, and JobGone where it is kept no longer.
        """
        reply = await self._run("jobs/request", tenant, job_id)
        _known(reply, job_id)
        if not reply[1]:
            raise JobGone(job_id)
        return reply[1]

    async def note_on_disk(self, tenant: str, job_id: str) -> bool:
        """Forget what an ended job asked, which is on disk now. False: it is kept no longer."""
        return await self._run("jobs/on_disk", tenant, job_id) == [b"ok"]

    async def annotate(self, tenant: str, job_id: str, metadata: Mapping[str, str]) -> None:
        """Give a job that is kept with its result other metadata. Raises JobNotFound, JobGone."""
        _known(await self._run("jobs/annotate", tenant, job_id, json.dumps(metadata)), job_id)

    async def recent(self, tenant: str, most: int) -> list[tuple[int, str]]:
        """Return when something befell a job of the tenant last, and its id; the latest first.

        No more than the last hundred of a day are known.
        """
        reply = await self._run("jobs/recent", tenant, most)
        pairs = zip(reply[1::2], reply[::2], strict=True)
        return [(int(float(at_ms)), job_id.decode()) for at_ms, job_id in pairs]

    async def accounts(self, most: int) -> list[AccountStatus]:
        """Return the accounts that submitted jobs last, of at most a thousand that are known."""
        reply = [item.decode() for item in await self._run("jobs/usage", most)]
        rows = [reply[at : at + 8] for at in range(0, len(reply), 8)]
        return [
            AccountStatus(
                name=name,
                tenant=tenant,
                num_queued=int(num_queued),
                num_running=int(num_running),
                blocked=limit or None,
                tokens_today=int(today),
                tokens_this_month=int(this_month),
                limits=Quota.model_validate_json(limits),
            )
            for name, tenant, num_queued, num_running, limit, today, this_month, limits in rows
        ]

    async def rates(self, account: str) -> Rates:
        """Return what an account has left of its minute in this lane."""
        requests, tokens, reset_ms = await self._run("jobs/rates", account)
        return Rates(_int(requests), _int(tokens), int(reset_ms))

    async def owner(self, job_id: str) -> str | None:
        """Return the tenant of a job, or None where the job is not known."""
        tenant = await self.connection.call("HGET", self.lane.job(job_id), "tenant")
        return tenant.decode() if isinstance(tenant, bytes) else None

    async def result(self, tenant: str, job_id: str) -> Result | None:
        """Return the whole answer, or None while the job runs. Raises JobNotFound and JobGone.

        Where no worker ended the job, choices without a token at the end of the list are left out.
        """
        reply = await self._run("jobs/result", tenant, job_id)
        _known(reply, job_id)
        if reply[1] == b"running":
            return None
        if reply[1] == b"result":
            return await _apart(read_result, reply[2])
        *deltas, end = await _events(reply[2:])
        assert not isinstance(end, Delta)
        parts = [event for event in deltas if isinstance(event, Delta)]
        num_choices = max((delta.index + 1 for delta in parts), default=0)
        result = fold(job_id, self.lane.model, num_choices, parts, end)
        return await _apart(read_result, result.dump().encode())

    # Private.

    async def _run(self, script: str, *args: Word) -> list[bytes]:
        reach(f"{script}.asked")
        reply = await self.connection.run(script, self.lane.prefix, *args)
        reach(f"{script}.answered")
        return reply


async def _apart(read: Callable[[bytes], T], text: bytes) -> T:
    """Read a text; a large one in a thread, by small calls, so that the event loop goes on."""
    if len(text) <= INLINE_BYTES:
        return read(text)
    return await asyncio.to_thread(read, text)


async def _events(texts: list[bytes]) -> list[Event]:
    """Read events, few enough at once that the event loop goes on."""
    events, num_bytes = list[Event](), 0
    for text in texts:
        events.append(EVENT.validate_json(text))
        num_bytes += len(text)
        if num_bytes > INLINE_BYTES:
            await asyncio.sleep(0)
            num_bytes = 0
    return events


def _is_full(page: list[bytes]) -> bool:
    return len(page) >= PAGE or sum(len(text) for text in page[1:]) >= PAGE_BYTES


def _events_of_result(text: bytes) -> list[Event]:
    return list(read_result(text).events())


def _timeline(created_ms: int, history: str, ended_ms: int | None, state: State) -> list[Moment]:
    moments = [Moment(at_ms=created_ms, what="queued")]
    for at_ms, step, *more in json.loads(f"[{history}]"):
        detail = {"worker" if step == "started" else "why": more[0]} if more else {}
        moments.append(Moment(at_ms=at_ms, what=step, **detail))
    if ended_ms is not None:
        moments.append(Moment(at_ms=ended_ms, what=state))
    return moments


def _int(text: bytes | str) -> int | None:
    return int(text) if text else None


def _known(reply: list[bytes], job_id: str) -> State:
    """Return the state that a reply begins with. Raises JobNotFound and JobGone."""
    if reply[0] == b"missing":
        raise JobNotFound(job_id)
    if reply[0] == b"gone":
        raise JobGone(job_id)
    return STATE.validate_python(reply[0].decode())
