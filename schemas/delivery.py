"""The values that pass between the queue and its callers, workers and readers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec
from pydantic import Field, JsonValue

from penstock.schemas.account import Quota
from penstock.schemas.counted import counted
from penstock.schemas.event import Delta, Done, Failed, State
from penstock.schemas.job import Job, QueueClass
from penstock.schemas.model import WorkerCard
from penstock.schemas.wire.wire import Report


class JobSignal(StrEnum):
    """A signal to a worker about one job: go on, or stop and why.

    A job's events are shown when they are logged and published to its readers.
    """

    KEEP = "K"  # shown: go on
    CANCEL = "C"  # shown; somebody cancelled: finish with Failed(state="cancelled")
    DEADLINE = "X"  # shown; time is up: finish with Failed(state="expired")
    BUDGET = "B"  # shown as far as the account's budget goes: finish, which says where to end
    FENCE = "F"  # not shown: the job is no longer yours; forget it and write nothing more
    DUPLICATE = "D"  # every event was there already, from an earlier try; go on


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same job is here already; nothing was changed
    SHARED = "shared"  # an equal job is here, whose id is the reason; nothing was changed
    MISMATCH = "mismatch"  # the id is taken by a job with another body
    FULL = "full"
    NO_WORKER = "no_worker"  # a foreground job, and no worker's lease runs
    LIMITED = "limited"  # the account's own limits: the reason says which
    UNMEETABLE = "unmeetable"  # at the live rate its time would be up before its turn came


@dataclass(frozen=True, slots=True)
class Submission:
    """The answer to `enqueue`.

    A refused job may be tried again after `retry_after_ms`, which follows from the measured drain
    rate, or from the end of the window that is used up.
    """

    outcome: Outcome
    num_queued: int = 0
    retry_after_ms: int = 0
    reason: str = ""  # LIMITED: the field of Quota; FULL: tokens, or empty
    created_ms: int = 0  # when the job that is here was submitted, by Redis's clock


@dataclass(frozen=True, slots=True)
class Rates:
    """The requests and tokens that an account has left of its minute. None means no such limit."""

    requests_left: int | None
    tokens_left: int | None
    reset_ms: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A claim on a job that is not started yet: its place in one ready stream."""

    ready: str
    entry_id: str
    job_id: str

    @property
    def is_suspect(self) -> bool:
        """Return whether workers died with this job, so that nothing else may run beside it."""
        return self.ready == "suspect"

    @property
    def is_batch(self) -> bool:
        """Return whether the job waited in the class `batch`, and was not handed back."""
        return self.ready == "batch"


class HeldRows(NamedTuple):
    """The rows of a full worker that are of one class or give way to it.

    most    the tenant that has the most of them for its weight
    weight  that tenant's weight
    rows    how many each tenant has
    """

    most: str
    weight: float
    rows: dict[str, int]


@dataclass(frozen=True, slots=True)
class Started:
    """A job to run, or to continue after `log`. The next delta's position is `position`."""

    job: Job
    epoch: int  # the fencing token; it also grows when a job ends without a worker
    log: list[Delta]
    left_ms: int | None  # until the deadline, by Redis's clock; None without one
    waited_ms: int  # since submission
    priority_class: QueueClass = "normal"  # the one that it waited in at last
    turn: int = 0  # when its turn came, in microseconds; in a class the earlier goes first
    budget_left: int | None = None  # tokens, prompts included; None without a budget
    budget_reset_at: int | None = None  # unix seconds
    trial: int | None = None  # the position at which a suspect stops being one
    queued_ms: int = 0  # from the submission to the first start of all attempts
    first_token_ms: int | None = None  # from the submission; None: no attempt made one yet
    weight: float = 1.0  # its account's share beside other tenants'

    @property
    def position(self) -> int:
        return self.log[-1].end if self.log else 0


class Commit(msgspec.Struct, frozen=True, gc=False):
    """New deltas of one job, in order. After an ambiguous failure send the very same again.

    The prompt's tokens, and how many of them were found computed, count once for a job, with its
    first commit that knows them.
    """

    job_id: str
    epoch: int
    deltas: Sequence[Delta]
    num_prompt: int | None = None
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a job, with all its deltas, of which the first `num_committed` are logged."""

    job: Job
    epoch: int
    deltas: Sequence[Delta]
    num_committed: int
    end: Done | Failed


@dataclass(frozen=True, slots=True)
class Page:
    """Events of a log after a cursor. The first may begin before the cursor.

    Where `more` is set, attach again at the end of these events.
    """

    state: State
    events: list[Delta | Done | Failed]
    more: bool


class OutOfBudget(Exception):
    """Raised when a job would end past its account's budget. It must end at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the budget ends at {counted(position, 'token')} of the job")
        self.position = position


Reason = Literal[
    "capacity", "turn", "running", "rate", "budget", "delayed", "no_worker", "suspect", "paused"
]


What = Literal["queued", "started", "first_token", "requeued", "set_aside"] | State


class Moment(Report):
    """Something that befell a job.

    A job is set aside when it waits for a worker of the model that made its tokens, and is requeued
    when it is taken from a worker. `why` then says how the worker lost it: it handed it back or
    left, crashed, its lease lapsed, or the two disagreed on the log.
    """

    at_ms: int
    what: What
    worker: str | None = None  # the worker that started it
    why: str | None = None


class JobStatus(Report):
    job_id: str
    model: str
    state: State
    num_tokens: int = Field(0, description="made so far, over all choices")
    background: bool = False
    cancelling: bool = Field(False, description="cancelled, and its worker was not heard yet")
    created_ms: int = 0
    started_ms: int | None = None
    ended_ms: int | None = None
    deadline_ms: int | None = Field(None, description="Redis's clock, as all of these")
    worker: str | None = Field(None, description="the incarnation that has it, or had it last")
    priority_class: QueueClass = Field("normal", description="raised when it waited too long")
    position: int | None = Field(None, description="while it waits, about: 1 is the next")
    reason: Reason | None = Field(None, description="what it waits for")
    metadata: dict[str, str] = Field({}, description="as submitted")
    eta_ms: int | None = Field(None, description="until it begins, at the live rate")
    resume: Literal["tokens", "text"] = Field(
        "tokens", description="what it would go on from at another worker"
    )
    timeline: list[Moment] = Field([], description="what befell it, the first 60 or so")


class AccountStatus(Report):
    """The state of an account in one model's queue, and its use of the model.

    Days and months are UTC's.
    """

    name: str
    tenant: str
    num_queued: int = 0
    num_running: int = 0
    blocked: str | None = Field(None, description="which limit holds its jobs back")
    tokens_today: int = 0
    tokens_this_month: int = 0
    limits: Quota = Quota()


class WorkerStatus(Report):
    worker: str
    card: WorkerCard
    stats: dict[str, JsonValue] = Field({}, description="the engine's, as of the last beat")
    lease_left_ms: int = Field(description="negative: lapsed, and its jobs go to others")


# Workers that crashed, or whose lease lapsed; jobs taken from such, put back, and given up as dead.
Total = Literal["crashed", "lapsed", "reaped", "requeued", "buried"]


class LaneStatus(Report):
    num_queued: int = Field(description="no worker has them; all that follow down to `delayed`")
    num_running: int = Field(description="read by a worker and not ended")
    num_ended: int
    interval_ms: float = Field(description="between two ends, while the lane was busy")
    by_class: dict[QueueClass, int] = Field({}, description="waiting in a backlog")
    num_delayed: int = 0
    num_handed_back: int = 0
    num_queued_tokens: int = Field(0, description="of prompts that no worker ever had, by a guess")
    oldest_waiting_ms: int = Field(0, description="about, of jobs that no worker ever had")
    is_wanted: bool = Field(
        False, description="foreground jobs were refused of late, since no worker is there"
    )
    is_paused: bool = Field(False, description="no job may begin, as an operator says")
    by_reason: dict[str, int] = Field({}, description="those that limits of their account hold")
    num_dead_letters: int = 0
    totals: dict[Total, int] = Field({}, description="since the lane's beginning")

    @property
    def num_unended(self) -> int:
        """Return how many jobs are left to do. At 0 the lane may be scaled to zero."""
        return self.num_queued + self.num_running


class DeadLetter(Report):
    """The record of a job that was given up: what an operator needs, and none of its content."""

    job: str
    reason: str
    tenant: str
    class_: str = Field("", alias="class")
    digest: str = Field("", description="of the body")
    request_bytes: int = 0
    num_tokens: int = Field(0, description="made before")
    deliveries: int = 0
    crashes: int = Field(0, description="of workers that had it")
    blame: int = Field(0, description="2 a crash met alone, 1 a lost lease")
    workers: str = Field("", description="that were lost with it")
    created_ms: int = 0
    died_ms: int = 0
