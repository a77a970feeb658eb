"""The queue of one lane: the only place that runs the Lua scripts or speaks to Redis for them.

Every transition of a job is one script, atomic and idempotent, so each call here may be repeated
after an ambiguous failure (the connection does so by itself). A lost race is an answer, never an
exception. What raises: QueueUnreachable when Redis cannot be asked, QueueFull when it is out of
memory, and the errors that each method names.
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import JsonValue, TypeAdapter, ValidationError

from schemas.account import Account
from schemas.connection import Connection
from schemas.crash import reach
from schemas.delivery import (
    Commit,
    DeadLetter,
    Ending,
    Entry,
    JobStatus,
    LaneStatus,
    Letter,
    Outcome,
    OutOfBudget,
    Page,
    Rates,
    Reason,
    Started,
    Submission,
    WorkerStatus,
)
from schemas.errors import InvalidJob, JobGone, JobNotFound
from schemas.event import EVENT, Delta, Failed, Result, State
from schemas.job import Job, PriorityClass
from schemas.keys import Lane
from schemas.link import Word
from schemas.model import WorkerCard
from schemas.result import KeptResult, fold
from schemas.servers import Redis

MAX_JOBS_A_CALL = 64  # bounds how long one script stalls Redis
PAGE = 512  # events that one attach returns
MAX_BLOCK_MS = 2000  # below the socket's time-out
CLASSES: tuple[PriorityClass, ...] = ("high", "normal", "batch")
STATE: TypeAdapter[State] = TypeAdapter(State)
CLASS: TypeAdapter[PriorityClass] = TypeAdapter(PriorityClass)
LETTERS = {letter.value.encode(): letter for letter in Letter}
REASON: TypeAdapter[Reason] = TypeAdapter(Reason)
STATS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


class Queue:
    """One lane. Workers read, start, commit, beat, finish, release; readers attach; all may sweep.

    `worker` is an incarnation: a name that is never used again once its lease was lost.
    """

    def __init__(
        self, redis: Redis, lane: Lane, lease_ms: int = 5000, orphan_grace_ms: int = 10_000
    ) -> None:
        self.lane = lane
        self.lease_ms = lease_ms
        self.orphan_grace_ms = orphan_grace_ms
        self._connection = Connection(redis)
        self._ticket = secrets.token_hex(8)
        self.must_be_empty = False  # as the latest read said: hand back what you hold, read alone

    # For those who put jobs in.

    async def enqueue(
        self,
        job: Job,
        reply_to: str | None,
        digest: str | None = None,
        max_queued: int = 10_000,
        result_ttl_s: int = 3600,
        account: Account | None = None,
        note: str | None = None,
        remember_s: int = 0,
    ) -> Submission:
        """Accept a job, or say why not. `reply_to` is a pub/sub channel; none: the job's own.

        `digest` stands for the body: the same id with the same digest is the same job, submitted
        again; none: what the job itself asks. A foreground job is refused where no worker's lease
        runs. The job counts for `account`, under the limits that it has now; none: for its
        tenant, without limits. The result is kept for `result_ttl_s` after the end. `note` is
        put in the lane's outbox when the job ends.
        Raises InvalidJob.
        """
        text, own_digest = job.dump_and_digest()
        options: dict[str, object] = {
            "tenant": job.tenant,
            "class": job.priority_class,
            "background": job.background,
            "prompt_tokens": job.guess_prompt_tokens(len(text)),
            "max_queued": max_queued,
            "ttl_s": result_ttl_s,
        }
        for name in ("timeout_ms", "queue_timeout_ms", "not_before_ms", "delay_ms"):
            if (value := getattr(job, name)) is not None:
                options[name] = value
        if job.over_limit != "refuse":
            options["over_limit"] = job.over_limit
        if job.metadata:
            options["metadata"] = job.metadata
        if remember_s:
            options["remember_s"] = remember_s
        if account is not None:
            options["account"] = account.model_dump(exclude_none=True)
        if note is not None:
            options["note"] = note
        reply = await self._run(
            "enqueue",
            job.job_id,
            own_digest if digest is None else digest,
            text,
            reply_to or self.lane.channel(job.job_id),
            json.dumps(options),
        )
        outcome, num_queued, retry_after_ms, reason = (item.decode() for item in reply)
        if outcome == "invalid":
            raise InvalidJob(f"job {job.job_id!r}: {reason}", "job_id")
        return Submission(Outcome(outcome), int(num_queued), int(retry_after_ms), reason)

    # For workers.

    async def register(self, worker: str, card: WorkerCard) -> None:
        """Begin a lease, or change the card of a running one."""
        await self._run("register", worker, self.lease_ms, card.dump())

    async def unregister(self, worker: str, crashed: bool = False) -> None:
        """End a lease at once; what the worker still held goes to others.

        `crashed`: it died of something that it had in work; see `reap.lua` for who is blamed.
        """
        await self._run("unregister", worker, "crashed" if crashed else "left")
        while await self.reap():
            pass

    async def read(
        self, worker: str, count: int, block_ms: int = 0, alone: bool = False
    ) -> list[Entry] | None:
        """Claim at most `count` jobs: handed-back ones first, then high, normal, batch.

        Waits up to `block_ms` for the first. None: the lease was lost, come back under a new
        incarnation. Every entry must be started, or released, by this worker. One call at a time.
        `alone`: the worker holds nothing, and will take nothing beside a suspect if it gets one.
        """
        reply = await self._run("read", worker, self._ticket, count, int(alone))
        if reply[0] == b"idle" and block_ms > 0:
            await self._wait(reply[1], min(block_ms, MAX_BLOCK_MS), int(reply[2]))
            reply = await self._run("read", worker, self._ticket, count, int(alone))
        self.must_be_empty = reply[0] == b"empty"
        self._ticket = secrets.token_hex(
            8
        )  # a repeat under the old one would have had the same answer
        if reply[0] == b"lost":
            return None
        texts = [text.decode() for text in reply[1:]] if reply[0] == b"entries" else []
        return [Entry(*texts[at : at + 3]) for at in range(0, len(texts), 3)]

    async def start(self, worker: str, entry: Entry) -> Started | None:
        """Take a claimed job up under a new epoch. None: nothing is left to do for it.

        Jobs that ended, were cancelled or are out of time end inside; so do those whose payload
        cannot be read, as Failed. The job is the worker's until it finishes or releases it.
        """
        reply = await self._run("start", worker, entry.ready, entry.entry_id, entry.job_id)
        if reply[0] != b"started":
            return None
        epoch, left_ms, waited_ms = int(reply[1]), int(reply[2]), int(reply[3])
        priority_class = CLASS.validate_python(reply[4].decode())
        turn, budget_left, trial = map(int, reply[5:8])
        request, *lines = reply[8:]
        events = [EVENT.validate_json(text) for text in lines]
        log = [event for event in events if isinstance(event, Delta)]
        try:
            job = Job.model_validate_json(request)
        except ValidationError as error:
            await self._refuse(worker, entry.job_id, epoch, log, _complaint(error))
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
            trial=trial if trial >= 0 else None,
        )

    async def commit(self, worker: str, commits: Sequence[Commit]) -> dict[str, Letter]:
        """Log and publish the deltas of a step; renew the lease; one letter for each job."""
        letters: dict[str, Letter] = {}
        calls = [
            self._commit(worker, commits[at : at + MAX_JOBS_A_CALL])
            for at in range(0, len(commits), MAX_JOBS_A_CALL)
        ]
        for some in await asyncio.gather(*calls):
            letters |= some
        return letters

    async def beat(
        self, worker: str, stats: dict[str, JsonValue] | None = None
    ) -> dict[str, Letter] | None:
        """Renew the lease; letters of held jobs that must stop. None: the lease was lost."""
        reply = await self._run("beat", worker, self.lease_ms, json.dumps(stats) if stats else "")
        if reply[0] == b"lost":
            return None
        texts = [text.decode() for text in reply[1:]]
        return {
            job_id: Letter(letter) for job_id, letter in zip(texts[::2], texts[1::2], strict=True)
        }

    async def finish(self, worker: str, ending: Ending) -> bool:
        """End a job: its last deltas, its end event, its result. False: it was not the worker's.

        Repeated, it is true again. The log goes a minute later, the result after its time.
        Raises OutOfBudget where it must end earlier; the deltas up to there are logged or may be.
        """
        job = ending.job
        kept = fold(job.job_id, job.model, job.num_choices, ending.deltas, ending.end)
        tail, usage = ending.deltas[ending.num_committed :], ending.end.usage
        reply = await self._run(
            "finish",
            worker,
            self.lease_ms,
            job.job_id,
            ending.epoch,
            ending.end.state,
            ending.end.dump(),
            ending.end.position,
            kept.dump(),
            _prompt(usage.prompt_tokens or None, usage.cached_tokens),
            len(tail),
            *_event_args(tail),
        )
        if reply[0] == Letter.BUDGET.encode():
            raise OutOfBudget(int(reply[1]))
        return Letter(reply[0].decode()) is not Letter.FENCED

    async def release(self, worker: str, job_ids: Iterable[str]) -> int:
        """Hand claimed or started jobs back, to be continued by another first of all."""
        ids, count = list(job_ids), 0
        for at in range(0, len(ids), MAX_JOBS_A_CALL):
            some = ids[at : at + MAX_JOBS_A_CALL]
            count += int((await self._run("release", worker, *some))[0])
        return count

    async def held(self, worker: str, idle_ms: int) -> set[str]:
        """Jobs that the worker claimed at least `idle_ms` ago, whether or not it knows of them."""
        return {job_id.decode() for job_id in await self._run("held", worker, idle_ms)}

    async def workers(self) -> list[WorkerStatus]:
        """Every worker that registered and was not reaped."""
        reply = await self._run("workers")
        return [
            WorkerStatus(
                worker=reply[at].decode(),
                lease_left_ms=int(reply[at + 1]),
                card=WorkerCard.model_validate_json(reply[at + 2] or b"{}"),
                stats=STATS.validate_json(reply[at + 3] or b"{}"),
            )
            for at in range(0, len(reply), 4)
        ]

    # For whoever keeps the house: workers each second, and the sweeps behind them.

    async def reap(self) -> int:
        """Hand on what workers with a lapsed lease hold, at most 64 entries; how many it was."""
        return int((await self._run("reap", MAX_JOBS_A_CALL))[0])

    async def next_lapse_ms(self) -> int | None:
        """Until the lease that ends first does so, if it is not renewed; none where none runs."""
        left_ms = int((await self._run("lapse"))[0])
        return left_ms if left_ms >= 0 else None

    async def sweep(self) -> int:
        """End queued jobs that are out of time, and foreground jobs that nobody listens to."""
        total, count = 0, MAX_JOBS_A_CALL
        while count >= MAX_JOBS_A_CALL:
            reply = await self._run("sweep", self.orphan_grace_ms, MAX_JOBS_A_CALL)
            count = int(reply[0])
            total += count
        return total

    async def counts(self) -> LaneStatus:
        reply, reasons, seen = list[str](), Counter[str](), 0
        while not reply or int(reply[8]) >= MAX_JOBS_A_CALL:
            reply = [item.decode() for item in await self._run("counts", seen)]
            reasons.update(dict(zip(reply[9::2], map(int, reply[10::2]), strict=True)))
            seen += int(reply[8])
        running, ended, interval_ms, handed_back, delayed = reply[:5]
        by_class = dict(zip(CLASSES, map(int, reply[5:8]), strict=True))
        return LaneStatus(
            num_queued=int(handed_back) + int(delayed) + sum(by_class.values()),
            num_running=int(running),
            num_ended=int(ended),
            interval_ms=float(interval_ms),
            by_class=by_class,
            num_delayed=int(delayed),
            num_handed_back=int(handed_back),
            by_reason=dict(reasons),
        )

    # For operators.

    async def dead_letters(self, most: int = 100) -> tuple[list[DeadLetter], int]:
        """The newest, newest first; and how many older ones were dropped to make room."""
        dropped, *letters = await self._run("dead", "", most)
        return [DeadLetter.model_validate_json(text) for text in letters], int(dropped)

    async def dead_letter(self, job_id: str) -> tuple[DeadLetter, Job | None]:
        """One letter, and its job to submit again; none if that is gone. Raises JobNotFound."""
        _, *rest = await self._run("dead", job_id, 1)
        if not rest:
            raise JobNotFound(job_id)
        job = Job.model_validate_json(rest[1]) if rest[1] else None
        return DeadLetter.model_validate_json(rest[0]), job

    async def drop_dead(self, job_id: str) -> bool:
        """Drop a dead letter and its request; false when there was none."""
        return (await self._run("drop", job_id))[0] == b"1"

    async def requeue_dead(self, job_id: str) -> Submission:
        """Submit a dead job again, in the background, under an id that follows from its own.

        Its letter goes when the queue has it. Repeated after a failure it is the same job.
        Raises JobNotFound, and JobGone when the request was kept no longer.
        """
        letter, job = await self.dead_letter(job_id)
        if job is None:
            raise JobGone(job_id)
        again = {"job_id": self.successor(job_id, letter.tenant), "background": True}
        job = job.model_copy(update={**again, "delay_ms": None, "not_before_ms": None})
        account = Account(name=f"dlq:{letter.tenant}")  # the tenant's own keep their limits
        submission = await self.enqueue(job, None, account=account)
        if submission.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            await self.drop_dead(job_id)
        return submission

    def successor(self, job_id: str, tenant: str) -> str:
        """The id under which a dead job is submitted again."""
        return self.lane.idempotent_job_id(tenant, f"dead:{job_id}")

    # For readers. A job of another tenant is not found.

    async def attach(self, tenant: str, job_id: str, channel: str, cursor: int) -> Page:
        """Add a reply channel to a job; the log after the cursor, with no gap to what is published.

        Raises JobNotFound, and JobGone when the result was kept no longer.
        """
        reply = await self._run("attach", tenant, job_id, channel, cursor, PAGE)
        state = _known(reply, job_id)
        if reply[1] == b"result":
            kept = KeptResult.model_validate_json(reply[2])
            return Page(state, list(kept.events()), more=False)
        events = [EVENT.validate_json(text) for text in reply[2:]]
        return Page(state, events, more=len(events) >= PAGE)

    async def detach(self, job_id: str, channel: str) -> None:
        await self._run("detach", job_id, channel)

    async def cancel(self, tenant: str, job_id: str) -> JobStatus:
        """Queued: ended here. Running: its worker is told. Ended: nothing; the status says how."""
        _known(await self._run("cancel", tenant, job_id, 0), job_id)
        return await self.status(tenant, job_id)

    async def delete(self, tenant: str, job_id: str) -> None:
        """Erase prompt, log and result; a running job is cancelled and erased as it stops."""
        _known(await self._run("cancel", tenant, job_id, 1), job_id)

    async def status(self, tenant: str, job_id: str) -> JobStatus:
        reply = await self._run("status", tenant, job_id)
        state = _known(reply, job_id)
        tokens, background, cancelling, created, started, ended, deadline, owner = reply[1:9]
        priority_class, metadata, position, reason, eta_ms = (item.decode() for item in reply[9:])
        return JobStatus(
            job_id=job_id,
            model=self.lane.model,
            state=state,
            num_tokens=int(tokens),
            background=background == b"1",
            cancelling=bool(cancelling) and not ended,
            created_ms=int(created),
            started_ms=_int(started),
            ended_ms=_int(ended),
            deadline_ms=_int(deadline),
            worker=owner.decode() or None,
            priority_class=CLASS.validate_python(priority_class),
            position=_int(position),
            reason=REASON.validate_python(reason) if reason else None,
            eta_ms=_int(eta_ms),
            metadata=json.loads(metadata or "{}"),
        )

    async def rates(self, account: str) -> Rates:
        """What an account has left of its minute in this lane."""
        requests, tokens, reset_ms = await self._run("rates", account)
        return Rates(_int(requests), _int(tokens), int(reset_ms))

    async def owner(self, job_id: str) -> str | None:
        """The tenant of a job, if it is known."""
        tenant = await self._connection.call("HGET", self.lane.job(job_id), "tenant")
        return tenant.decode() if isinstance(tenant, bytes) else None

    async def result(self, tenant: str, job_id: str) -> Result | None:
        """The whole answer; none while the job runs. Raises JobNotFound and JobGone.

        Of a job that no worker ended, choices without a token are left out.
        """
        reply = await self._run("result", tenant, job_id)
        _known(reply, job_id)
        if reply[1] == b"running":
            return None
        if reply[1] == b"result":
            return Result.model_validate_json(reply[2])
        *deltas, end = [EVENT.validate_json(text) for text in reply[2:]]
        assert not isinstance(end, Delta)
        made = [event for event in deltas if isinstance(event, Delta)]
        num_choices = max((delta.index + 1 for delta in made), default=0)
        kept = fold(job_id, self.lane.model, num_choices, made, end)
        return Result.model_validate_json(kept.dump())

    # Private.

    async def _run(self, script: str, *args: Word) -> list[bytes]:
        reach(f"{script}.asked")
        reply = await self._connection.run(script, self.lane.prefix, *args)
        reach(f"{script}.answered")
        return reply

    async def _commit(self, worker: str, commits: Sequence[Commit]) -> dict[str, Letter]:
        args: list[Word] = []
        for commit in commits:
            args += _commit_args(commit)
        reply = await self._run("commit", worker, self.lease_ms, len(commits), *args)
        ids = [commit.job_id for commit in commits]
        return dict(zip(ids, [LETTERS[letter] for letter in reply], strict=True))

    async def _wait(self, newest: bytes, block_ms: int, due_ms: int) -> None:
        """Return once there is news, or something is due. It claims nothing: others wait too."""
        if 0 <= due_ms < block_ms:
            block_ms = due_ms + 1
        await self._connection.call(
            "XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", self.lane.news, newest
        )

    async def _refuse(
        self, worker: str, job_id: str, epoch: int, log: list[Delta], sentence: str
    ) -> None:
        """End a job whose payload no worker could run."""
        position = log[-1].end if log else 0
        end = Failed(position=position, state="failed", error=InvalidJob(sentence).body())
        empty = Job.model_construct(job_id=job_id, model=self.lane.model, prompts=[])
        await self.finish(worker, Ending(empty, epoch, log, len(log), end))


def _int(text: bytes | str) -> int | None:
    return int(text) if text else None


def _known(reply: list[bytes], job_id: str) -> State:
    """The state that a reply begins with."""
    if reply[0] == b"missing":
        raise JobNotFound(job_id)
    if reply[0] == b"gone":
        raise JobGone(job_id)
    return STATE.validate_python(reply[0].decode())


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


def _complaint(error: ValidationError) -> str:
    """The first thing wrong with a payload: field and limit, and nothing of what it held."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "job"
    return f"{place}: {first['msg']}"
