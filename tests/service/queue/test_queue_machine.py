"""All transitions in every order: virtual workers that stall and die, readers that come and go.

Time passes by rule: a lease lapses, a deadline is reached, because a rule says so. A worker that
lost a job writes poison where the log goes on, so that a fence that leaks is seen by every reader.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from penstock.gateway.housekeeping.reconcile import Reconciler
from penstock.schemas.account import Account, Quota
from penstock.schemas.delivery import Commit, Ending, Entry, JobSignal, Outcome, Started
from penstock.schemas.errors import Cancelled, JobNotFound
from penstock.schemas.event import EVENT, Delta, Failed
from penstock.schemas.job import Job
from penstock.schemas.keys import READY
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.queue import CLASSES
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.result import after
from scripted import LANE, a_job, delta, done

T = TypeVar("T")
TAP = "tap"
LIMITED = Account(  # of tenant `other`
    name="other/key", limits=Quota(max_running=2, weight=2, tokens_per_minute=10**9)
)
POISON = 10**6
PICK = st.integers(0, 10**6)
FEW = st.integers(1, 3)


@dataclass(slots=True, eq=False)
class Known:
    """What must be true of one job."""

    job: Job
    ready: str
    worker: str | None = None
    has_slot: bool = False  # claimed once, and not ended
    is_delayed: bool = False
    prompt: int | None = None  # tokens that its account was charged for it
    taken: Started | None = None  # none while claimed and not started
    log: list[Delta] = field(default_factory=list)
    is_cancelled: bool = False
    is_late: bool = False
    is_erased: bool = False
    is_told: bool = False  # a beat of its worker would tell why to stop
    is_decoding: bool = False  # committed since it was taken up
    trial: int | None = None  # a suspect until this position is logged
    crashes: int = 0
    blame: int = 0
    state: str | None = None  # how it ended

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def position(self) -> int:
        return self.log[-1].end if self.log else 0

    @property
    def counted(self) -> int:
        """Tokens of its minute."""
        used = (self.prompt or 0) + self.position
        return used if self.state else max(used, self.cost + self.job.guess_completion_tokens())

    @property
    def cost(self) -> int:
        return self.job.guess_prompt_tokens(len(self.job.dump()))

    def note_log(self) -> None:
        self.is_decoding = True
        if self.trial is not None and self.position >= self.trial:
            self.trial = None

    def meet_a_crash(self, weight: int) -> bool:
        """While it was running; whether it is the job's end."""
        if self.trial is not None and self.ready == "suspect":
            self.blame += weight
        self.crashes += 1
        trial = 0 if self.is_decoding else self.position + 1
        trial = self.position + 64 if self.crashes >= 4 else trial
        trial = 2**31 - 1 if self.crashes >= 8 else trial
        self.trial = max(self.trial or 0, trial) or None
        return self.blame >= 4

    @property
    def is_held_up(self) -> bool:
        """Where its account has no slot free."""
        return self.job.tenant == "other" and not self.has_slot

    @property
    def signal(self) -> JobSignal:
        if self.is_cancelled:
            return JobSignal.CANCEL
        return JobSignal.DEADLINE if self.is_late else JobSignal.KEEP


@dataclass(slots=True, eq=False)
class VirtualReader:
    known: Known
    channel: str
    cursor: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ends: int = 0
    is_attached: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """A claim that its worker does not know to be gone."""

    worker: str
    known: Known
    epoch: int


class QueueMachine(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.plain = redis.Redis.from_url(url)
        self.plain.flushall()
        self.runner = asyncio.Runner()
        self.redis = connect(url)
        self.queue = WorkerQueue(self.redis, LANE)
        self.pubsub = self.plain.pubsub()
        self.pubsub.subscribe(TAP)
        self.jobs: dict[str, Known] = {}
        self.shown: dict[str, list[bytes]] = {}  # what was published, by job
        self.workers: list[str] = []
        self.lost: list[Lost] = []
        self.dead: list[str] = []
        self.readers: list[VirtualReader] = []
        self.minute: bytes | None = None  # in which the first job of `other` came
        self.names = iter(range(10**9))
        self.add_worker()
        self.add_worker()
        for name in CLASSES:
            self.submit(name, name == "batch", True)

    def do(self, work: Coroutine[object, object, T]) -> T:
        return self.runner.run(work)

    # Choosing.

    def waiting(self) -> list[Known]:
        return [one for one in self.jobs.values() if one.state is None and one.worker is None]

    def held(self) -> list[Known]:
        return [one for one in self.jobs.values() if one.state is None and one.worker]

    def running(self) -> list[Known]:
        return [one for one in self.held() if one.taken]

    def claimed(self) -> list[Known]:
        return [one for one in self.held() if not one.taken]

    def num_slots(self) -> int:
        return sum(one.has_slot for one in self.jobs.values() if one.job.tenant == "other")

    # What happens to a job.

    def end(self, known: Known, state: str) -> None:
        assert known.state is None
        known.state, known.worker, known.has_slot = state, None, False

    def lose(self, known: Known) -> None:
        """Its worker does not have it any more, and was not told."""
        if known.taken and known.worker:
            self.lost.append(Lost(known.worker, known, known.taken.epoch))
        known.worker, known.taken, known.is_told, known.is_decoding = None, None, False, False
        known.ready = "resume" if known.trial is None else "suspect"
        if known.is_cancelled:
            self.end(known, "cancelled")

    # Rules.

    @rule()
    @precondition(lambda self: len(self.workers) < 3)
    def add_worker(self) -> None:
        name = f"w{next(self.names)}"
        self.do(self.queue.register(name, WorkerCard()))
        self.workers.append(name)

    @rule(
        names=st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3),
        background=st.booleans(),
        is_timed=st.booleans(),
        is_delayed=st.booleans(),
        tenant=st.sampled_from(("default", "other", "other")),
    )
    def enqueue(
        self, names: list[str], background: bool, is_timed: bool, is_delayed: bool, tenant: str
    ) -> None:
        for name in names:
            self.submit(name, background, is_timed, is_delayed, tenant)

    def submit(
        self,
        name: str,
        background: bool,
        is_timed: bool,
        is_delayed: bool = False,
        tenant: str = "default",
    ) -> None:
        fields: dict[str, object] = {"timeout_ms": 600_000} if is_timed else {}
        if is_delayed:
            fields["delay_ms"] = 500_000
        if name == "text":
            fields["text"] = {"task": "tokenize"}
        job = a_job(priority_class=name, background=background, tenant=tenant, **fields)
        account = LIMITED if tenant == "other" else None
        num_waiting = len(self.waiting())
        answer = self.do(self.queue.enqueue(job, TAP, "d", max_queued=8, account=account))
        if not background and not self.workers:
            assert answer.outcome is Outcome.NO_WORKER
        elif num_waiting >= 8:
            assert answer.outcome is Outcome.FULL
        else:
            assert answer.outcome is Outcome.ACCEPTED
            self.jobs[job.job_id] = Known(job, name, is_delayed=is_delayed)
        assert answer.num_queued == num_waiting

    @rule(
        pick=PICK,
        what=st.sampled_from(
            ("submit again", "submit another", "reap", "flush", "hear the dead", "mend", "look")
        ),
    )
    def change_nothing(self, pick: int, what: str) -> None:
        if what.startswith("submit") and self.jobs:
            known = list(self.jobs.values())[pick % len(self.jobs)]
            if not known.is_erased:
                self.submit_again(known, what == "submit again")
        elif what == "reap":
            assert self.do(self.queue.reap()) == 0
        elif what == "flush":
            self.plain.script_flush()
        elif what == "mend":
            assert self.do(Reconciler(self.redis, missing_ms=0).look(self.queue, 60)) == []
        elif what == "look":
            self.look()
        elif self.dead:
            worker = self.dead[pick % len(self.dead)]
            assert self.do(self.queue.beat(worker)) is None
            assert self.do(self.queue.read(worker, 4)) is None

    def look(self) -> None:
        """What each worker holds, and when the first lease ends."""
        for worker in self.workers:
            mine = {one.job_id for one in self.held() if one.worker == worker}
            assert self.do(self.queue.held(worker, 0)) == mine
        scores = [
            ends for _, ends in self.plain.zrange(f"{LANE.prefix}workers", 0, -1, False, True)
        ]
        before_ms, left_ms, after_ms = (
            self.now_ms(),
            self.do(self.queue.next_lapse_ms()),
            self.now_ms(),
        )
        if left_ms is None:
            assert not self.workers
        else:
            first = min(scores)
            assert max(0, first - after_ms) <= left_ms <= max(0, first - before_ms)

    def now_ms(self) -> int:
        seconds, micros = self.plain.time()
        return seconds * 1000 + micros // 1000

    def submit_again(self, known: Known, is_same: bool) -> None:
        answer = self.do(self.queue.enqueue(known.job, "elsewhere", "d" if is_same else "other"))
        assert answer.outcome is (Outcome.DUPLICATE if is_same else Outcome.MISMATCH)

    @precondition(lambda self: [one for one in self.waiting() if one.is_delayed])
    @rule(pick=PICK)
    def come_due(self, pick: int) -> None:
        delayed = [one for one in self.waiting() if one.is_delayed]
        self.make_due(delayed[pick % len(delayed)])

    def make_due(self, known: Known) -> None:
        self.plain.zadd(f"{LANE.prefix}delayed", {known.job_id: 1}, xx=True)
        known.is_delayed = False

    @precondition(lambda self: self.workers and self.waiting())
    @rule(pick=PICK, count=st.integers(1, 4))
    def take_up(self, pick: int, count: int) -> None:
        """What a worker does mostly: read, and start all that came."""
        self.read(pick, count, False)
        for known in self.claimed():
            self.start_one(known, False)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, count=st.integers(1, 4), is_lost=st.booleans())
    def read(self, pick: int, count: int, is_lost: bool) -> None:
        worker, ticket = self.workers[pick % len(self.workers)], self.queue._ticket
        is_alone = not [one for one in self.held() if one.worker == worker]
        entries = self.do(self.queue.read(worker, count, alone=is_alone)) or []
        if is_lost and entries:  # the reply never came: the call is repeated
            self.queue._ticket = ticket
            assert self.do(self.queue.read(worker, count, alone=is_alone)) == entries
        suspects = [one for one in self.waiting() if one.ready == "suspect"]
        others = [one for one in self.waiting() if one not in suspects and not one.is_delayed]
        waiting = {one.job_id: one for one in others}
        if self.queue.must_be_empty:
            assert suspects and not is_alone and not entries
            return
        if suspects and is_alone:  # one of them, and nothing beside
            count, waiting = 1, {one.job_id: one for one in suspects}
        free = 2 - self.num_slots()
        num_held_up = max(0, sum(one.is_held_up for one in waiting.values()) - free)
        assert len(entries) == min(count, len(waiting) - num_held_up)
        for entry in entries:
            known = waiting.pop(entry.job_id)
            assert entry.ready == known.ready
            free -= known.is_held_up
            known.worker, known.has_slot = worker, True
        assert free >= 0
        left = [one for one in waiting.values() if free or not one.is_held_up]
        if entries and left:
            rest = min(READY.index(one.ready) for one in left)
            assert max(READY.index(entry.ready) for entry in entries) <= rest

    @precondition(lambda self: self.claimed())
    @rule(pick=PICK, repeats=st.booleans())
    def start(self, pick: int, repeats: bool) -> None:
        self.start_one(self.claimed()[pick % len(self.claimed())], repeats)

    def start_one(self, known: Known, repeats: bool) -> None:
        entry_id = (self.plain.hget(LANE.job(known.job_id), "entry") or b"").decode()
        entry = Entry(known.ready, entry_id, known.job_id)
        taken = self.do(self.queue.start(known.worker, entry))
        if known.is_late:
            assert taken is None
            self.end(known, "expired")
            return
        assert taken and taken.job == known.job and taken.log == known.log
        assert taken.trial == known.trial
        assert all(taken.epoch > lost.epoch for lost in self.lost if lost.known is known)
        known.taken = taken
        if repeats:
            again = self.do(self.queue.start(known.worker, entry))
            assert again and again.epoch == taken.epoch

    @precondition(lambda self: self.running())
    @rule(sizes=st.lists(FEW, min_size=1, max_size=3))
    def step(self, sizes: list[int]) -> None:
        for worker in sorted({one.worker for one in self.running() if one.worker}):
            at = [one.worker for one in self.running()].index(worker)
            self.commit(at, sizes, 0)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, sizes=st.lists(FEW, min_size=1, max_size=3), repeats=st.integers(0, 2))
    def commit(self, pick: int, sizes: list[int], repeats: int) -> None:
        """A step of one worker: some new tokens of each of its jobs, sent again when in doubt."""
        worker = self.running()[pick % len(self.running())].worker
        mine = [one for one in self.running() if one.worker == worker]
        commits, made = [], {}
        for known in mine:
            new: list[Delta] = []
            for size in sizes:
                new.append(delta(known.job_id, new[-1].end if new else known.position, size))
            commits.append(Commit(known.job_id, known.taken.epoch, new, 7, 2))
            made[known.job_id] = new
        signals = self.do(self.queue.commit(worker, commits))
        assert signals == {one.job_id: one.signal for one in mine}
        for known in mine:
            known.log += made[known.job_id]
            known.prompt = known.prompt or 7
            known.note_log()
        for _ in range(repeats):
            signals = self.do(self.queue.commit(worker, commits))
            assert signals == {
                one.job_id: JobSignal.DUPLICATE if one.signal is JobSignal.KEEP else one.signal
                for one in mine
            }

    @precondition(lambda self: self.running())
    @rule(pick=PICK, back=st.integers(0, 1))
    def commit_elsewhere(self, pick: int, back: int) -> None:
        """Not where the log goes on: past its end, or over it."""
        known = self.running()[pick % len(self.running())]
        position = max(0, known.position - back)
        wrong = delta(known.job_id, position + (0 if position < known.position else 1), 2)
        signals = self.do(
            self.queue.commit(known.worker, [Commit(known.job_id, known.taken.epoch, [wrong])])
        )
        assert signals == {known.job_id: JobSignal.FENCE}
        self.lose(known)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, size=st.integers(0, 3), repeats=st.booleans())
    def finish(self, pick: int, size: int, repeats: bool) -> None:
        known = self.running()[pick % len(self.running())]
        made = known.log + ([delta(known.job_id, known.position, size)] if size else [])
        ending = Ending(known.job, known.taken.epoch, made, len(known.log), done(made))
        if known.is_cancelled:
            error = Cancelled("stopped").body()
            end = Failed(position=ending.end.position, state="cancelled", error=error)
            ending = Ending(known.job, known.taken.epoch, made, len(known.log), end)
        for _ in range(1 + repeats):
            is_ended = self.do(self.queue.finish(known.worker, ending))
            assert is_ended or (known.is_erased and known.state)
            if known.state is None:
                known.prompt = known.prompt or ending.end.usage.prompt_tokens
                known.log = made
                self.lost.append(Lost(known.worker, known, known.taken.epoch))
                worker = known.worker
                self.end(known, ending.end.state)
                known.worker = worker
        known.worker = None

    @precondition(lambda self: self.held())
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        known = self.held()[pick % len(self.held())]
        assert self.do(self.queue.release(known.worker, [known.job_id])) == 1
        self.lose(known)

    @precondition(lambda self: len(self.waiting() + self.held()) > 2)
    @rule(pick=PICK, how=st.sampled_from(("late", "late", "cancelled", "erased")))
    def stop(self, pick: int, how: str) -> None:
        known = [one for one in self.jobs.values() if not one.is_erased]
        if not known:
            return None
        known.sort(key=lambda one: one.state is not None)
        known = known[pick % len(known)]
        if how == "late":
            return self.time_is_up(known)
        if how == "erased":
            self.do(self.queue.delete(known.job.tenant, known.job_id))
            known.is_erased = True
        else:
            status = self.do(self.queue.cancel(known.job.tenant, known.job_id))
            assert status.num_tokens == known.position
        if known.state is None:
            known.is_cancelled = True
            if known.taken:
                known.is_told = True
            else:
                self.end(known, "cancelled")
        return None

    def time_is_up(self, known: Known) -> None:
        if known.job.timeout_ms and known.state is None:
            self.plain.hset(LANE.job(known.job_id), "deadline", 1)
            self.plain.zadd(f"{LANE.prefix}deadlines", {known.job_id: 1})
            known.is_late = True

    @precondition(lambda self: [one for one in self.running() if one.is_told])
    @rule(pick=PICK)
    def beat(self, pick: int) -> None:
        worker = self.workers[pick % len(self.workers)]
        signals = self.do(self.queue.beat(worker))
        told = [one for one in self.running() if one.worker == worker and one.is_told]
        assert signals == {one.job_id: one.signal for one in told}

    @precondition(lambda self: len(self.workers) > 1)
    @rule(pick=PICK, how=st.sampled_from(("lapses", "crashes", "crashes", "leaves")))
    def die(self, pick: int, how: str) -> None:
        """Its lease lapses, or it unregisters; all that it held goes to others."""
        worker = self.workers.pop(pick % len(self.workers))
        held = [one for one in self.held() if one.worker == worker]
        if how == "lapses":
            self.plain.zadd(f"{LANE.prefix}workers", {worker: 1})
            assert self.do(self.queue.reap()) == len(held)
        else:
            self.do(self.queue.unregister(worker, crashed=how == "crashes"))
        for known in held:
            is_charged = how != "leaves" and known.taken and not known.is_cancelled
            if is_charged and known.meet_a_crash(2 if how == "crashes" else 1):
                self.lost.append(Lost(worker, known, known.taken.epoch))
                self.end(known, "dead")
            else:
                self.lose(known)
        self.dead.append(worker)

    @precondition(lambda self: [one for one in self.waiting() if one.ready == "suspect"])
    @rule(how=st.sampled_from(("crashes", "crashes", "lapses", "works")))
    def try_a_suspect(self, how: str) -> None:
        """A new worker takes one, and nothing else."""
        self.add_worker()
        self.take_up(len(self.workers) - 1, 4)
        if how != "works":
            self.die(len(self.workers) - 1, how)

    @precondition(lambda self: self.lost)
    @rule(pick=PICK, finishes=st.booleans())
    def write_without_a_claim(self, pick: int, finishes: bool) -> None:
        again = [lost for lost in self.lost if lost.worker == lost.known.worker]
        choice = again or self.lost  # who has the job again has only the epoch against it
        lost = choice[pick % len(choice)]
        known = lost.known
        poison = Delta(position=known.position, token_ids=[POISON], text="poison")
        if finishes:
            made = [*known.log, poison]
            ending = Ending(known.job, lost.epoch, made, len(known.log), done(made))
            is_repeat = known.state is not None and not known.is_erased
            answer = self.do(self.queue.finish(lost.worker, ending))
            assert not answer or is_repeat  # nothing is written then: the readers would see it
        else:
            commit = Commit(known.job_id, lost.epoch, [poison])
            signals = self.do(self.queue.commit(lost.worker, [commit]))
            assert signals == {known.job_id: JobSignal.FENCE}
        if known.worker != lost.worker:
            assert self.do(self.queue.release(lost.worker, [known.job_id])) == 0

    @precondition(lambda self: self.running() and len(self.workers) > 1)
    @rule(pick=PICK)
    def write_for_another(self, pick: int) -> None:
        """The right epoch, and not the owner."""
        known = self.running()[pick % len(self.running())]
        worker = next(name for name in self.workers if name != known.worker)
        poison = Delta(position=known.position, token_ids=[POISON], text="poison")
        commit = Commit(known.job_id, known.taken.epoch, [poison])
        assert self.do(self.queue.commit(worker, [commit])) == {known.job_id: JobSignal.FENCE}
        assert self.do(self.queue.release(worker, [known.job_id])) == 0

    @precondition(lambda self: [one for one in self.jobs.values() if one.is_late and not one.state])
    @rule()
    def sweep(self) -> None:
        for name in self.plain.zrangebyscore(f"{LANE.prefix}deadlines", 0, "+inf"):
            known = self.jobs[name.decode()]
            if known.is_late:
                self.plain.zadd(f"{LANE.prefix}deadlines", {name: 1})
                known.is_told = known.taken is not None
        self.do(self.queue.sweep())
        for known in self.waiting() + self.claimed():
            if known.is_late:
                self.end(known, "expired")

    @precondition(lambda self: self.jobs and len(self.readers) < 8)
    @rule(pick=PICK)
    def attach(self, pick: int) -> None:
        known = list(self.jobs.values())[pick % len(self.jobs)]
        reader = VirtualReader(known, f"r{next(self.names)}")
        self.readers.append(reader)
        self.pubsub.subscribe(reader.channel)
        self.read_log(reader)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK, leaves=st.booleans())
    def come_or_go(self, pick: int, leaves: bool) -> None:
        reader = self.readers[pick % len(self.readers)]
        self.hear()
        if leaves:
            self.do(self.queue.detach(reader.known.job_id, reader.channel))
            reader.is_attached = False
        else:
            self.read_log(reader)

    # What readers see.

    def read_log(self, reader: VirtualReader) -> None:
        self.hear()
        known = reader.known
        try:
            page = self.do(
                self.queue.attach(known.job.tenant, known.job_id, reader.channel, reader.cursor)
            )
        except JobNotFound:
            assert known.is_erased and known.state
            return
        reader.is_attached = known.state is None
        assert (page.state == known.state) if known.state else True
        for event in page.events:
            self.deliver(reader, event)

    def deliver(self, reader: VirtualReader, event: object) -> None:
        rest = after(event, reader.cursor)
        if isinstance(rest, Delta):
            assert rest.position == reader.cursor, "a gap, or a repeat"
            reader.tokens += rest.token_ids
            reader.text += rest.text
            reader.cursor = rest.end
        elif rest is not None and not reader.ends:
            reader.ends += 1
            assert rest.position == reader.cursor

    def hear(self) -> None:
        """Take what was published, to its last message."""
        self.plain.publish(TAP, b"mark")
        while True:
            message = self.pubsub.get_message(timeout=60)
            assert message, "nothing came, not even the mark"
            if message["type"] != "message":
                continue
            if message["data"] == b"mark":
                break
            self.hear_lines(message["channel"].decode(), message["data"])
        for reader in self.readers:
            if reader.is_attached:
                assert reader.cursor == reader.known.position, "not all of it was shown"
                assert reader.ends == (reader.known.state is not None)

    def hear_lines(self, channel: str, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            said = json.loads(line)
            if channel == TAP:
                self.shown.setdefault(said["job_id"], []).append(line)
                continue
            (reader,) = [one for one in self.readers if one.channel == channel]
            assert said["job_id"] == reader.known.job_id
            if reader.is_attached:
                self.deliver(reader, EVENT.validate_python(said["event"]))

    # What is always true.

    @invariant()
    def the_counts_are_true(self) -> None:
        counts = self.do(self.queue.counts())
        # A claimed job that ended is unclaimed with it, so what is held is what is pending.
        assert (counts.num_queued, counts.num_running) == (len(self.waiting()), len(self.held()))

    @invariant()
    def the_minute_holds_what_may_be_used_and_at_the_end_what_was(self) -> None:
        minute, tokens = self.plain.hmget(
            f"{LANE.prefix}account:{LIMITED.name}", "minute", "tokens"
        )
        self.minute = self.minute or minute
        if minute != self.minute:
            return
        mine = [one for one in self.jobs.values() if one.job.tenant == "other"]
        assert int(tokens or 0) == sum(one.counted for one in mine)

    @invariant()
    def the_lane_counts_the_tokens_that_wait(self) -> None:
        """Until a first claim; at the end none."""
        counted = self.plain.hget(f"{LANE.prefix}counts", "queued_tokens")
        new = [one for one in self.waiting() if not one.has_slot]
        assert int(counted or 0) == sum(one.cost for one in new)

    @invariant()
    def the_account_holds_its_slots_and_no_more(self) -> None:
        account = self.plain.hmget(f"{LANE.prefix}account:{LIMITED.name}", "running", "queued")
        mine = [one for one in self.waiting() if one.is_held_up]
        assert [int(count or 0) for count in account] == [self.num_slots(), len(mine)]
        assert self.num_slots() <= 2

    def teardown(self) -> None:
        try:
            self.drain()
            self.check_the_end()
        finally:
            self.do(self.redis.aclose())
            self.runner.close()
            self.pubsub.close()
            self.plain.close()

    def drain(self) -> None:
        """A last worker outlives all others, and runs every job that is left to its end."""
        while self.workers:
            self.die(0, "lapses")
        self.add_worker()
        for known in self.waiting():
            if known.is_delayed:
                self.make_due(known)
        while entries := self.do(self.queue.read(self.workers[0], 4, alone=True)):
            for entry in entries:
                known = self.jobs[entry.job_id]
                taken = self.do(self.queue.start(self.workers[0], entry))
                if taken is None:
                    assert known.is_late
                    self.end(known, "expired")
                    continue
                assert taken.log == known.log
                known.prompt = known.prompt or 1
                known.log = [*known.log, delta(known.job_id, known.position, 2)]
                ending = Ending(known.job, taken.epoch, known.log, len(taken.log), done(known.log))
                assert self.do(self.queue.finish(self.workers[0], ending))
                self.end(known, "succeeded")
        self.hear()

    def check_the_end(self) -> None:
        self.the_minute_holds_what_may_be_used_and_at_the_end_what_was()
        self.the_lane_counts_the_tokens_that_wait()
        for known in self.jobs.values():
            self.check_job(known)
        self.check_usage("default", "default")
        self.check_usage("other", LIMITED.name)
        for reader in self.readers:
            self.read_log(reader)
            if not reader.known.is_erased:
                assert reader.ends == 1
                whole = reader.known.log
                assert reader.tokens == [token for one in whole for token in one.token_ids]
                assert reader.text == "".join(one.text for one in whole)
        for name in READY:
            assert self.plain.xlen(LANE.ready(name)) == 0
            if self.plain.exists(LANE.ready(name)):  # without a group where nobody read it
                groups = self.plain.xinfo_groups(LANE.ready(name))
                assert [each["pending"] for each in groups] in ([], [0])
        leased = [each.decode() for each in self.plain.zrange(f"{LANE.prefix}workers", 0, -1)]
        for key in self.plain.keys(f"{LANE.prefix}*"):
            name = key.decode().removeprefix(LANE.prefix)
            is_lane = name in ("workers", "counts", "news") or name.startswith("ready:")
            is_lane = is_lane or name in [f"worker:{worker}" for worker in leased]
            assert is_lane or self.plain.ttl(key) > 0, f"{name} would stay for ever"
        self.do(self.queue.unregister(self.workers[0]))

    def check_usage(self, tenant: str, account: str) -> None:
        """What an account was charged is what its logs hold; a day may have ended meanwhile."""
        charged: Counter[str] = Counter()
        for key in self.plain.keys(f"{LANE.prefix}usage:????-??-??:{account}"):
            charged.update({name.decode(): int(n) for name, n in self.plain.hgetall(key).items()})
        mine = [one for one in self.jobs.values() if one.job.tenant == tenant]
        prompts = [one.prompt or 0 for one in mine]
        assert charged == Counter(
            completion_tokens=sum(one.position for one in mine),
            prompt_tokens=sum(prompts),
            cached_tokens=2 * prompts.count(7),
            jobs=len(mine),
        )

    def check_job(self, known: Known) -> None:
        assert known.state is not None
        lines = [json.loads(line)["event"] for line in self.shown.get(known.job_id, [])]
        *shown, end = [EVENT.validate_python(event) for event in lines]
        assert shown == known.log
        assert end.state == known.state and end.position == known.position
        log = self.plain.xrange(f"{LANE.job(known.job_id)}:log")
        if known.is_erased:
            assert not self.plain.keys(f"*{known.job_id}*")
        else:
            assert [json.loads(fields[b"e"]) for _, fields in log] == lines
            result = self.do(self.queue.result(known.job.tenant, known.job_id))
            assert result and result.state == known.state


@pytest.mark.slow
def test_every_order_of_events_keeps_the_promises(redis_url: str) -> None:
    run_machine(
        lambda: QueueMachine(redis_url),
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
