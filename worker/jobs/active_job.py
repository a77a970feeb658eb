"""A job in work: its sequences in the engine, its completions, and how much of them is logged."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.schemas.cursor import Cursor
from penstock.schemas.delivery import Commit, Ending, Started
from penstock.schemas.errors import Cancelled, DeadlineExceeded
from penstock.schemas.event import Delta, Done, ErrorBody, Failed, FinishReason, Timing, Usage
from penstock.schemas.job import Job
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.schemas.process.trace_context import log_fields
from penstock.schemas.wire.checksum import EMPTY, roll
from penstock.worker.engine.io.messages import (
    BATCH_PRIORITY,
    NO_WORDS,
    AddSequence,
    Output,
    WordIds,
)
from penstock.worker.jobs.pooled import Pooled
from penstock.worker.jobs.text_choices import TextChoice
from penstock.worker.text.completion import Completion, TextPiece

Failure = Literal["failed", "cancelled", "expired"]
_PRIORITIES = {"text": 0, "high": 0, "normal": 1, "batch": BATCH_PRIORITY}


@dataclass(slots=True)
class Times:
    """When an attempt at a job came how far, as unix time in nanoseconds; 0: it did not."""

    started_ns: int = 0
    admitted_ns: int = 0  # its sequences went to the engine
    first_ns: int = 0  # the engine's first output
    first_committed_ns: int = 0
    last_ns: int = 0  # the output that ended its last choice
    logged_ns: dict[int, int] = field(default_factory=dict)  # monotonic: a choice's last event


@dataclass(slots=True, eq=False)
class ActiveJob:
    """A job in work, with a completion for each choice and the deltas made of them.

    New pieces wait in `_pending`, at most one a choice. Once sealed as deltas they never change,
    so that they can be sent again; the first `num_committed` deltas are known to be in the log.
    Raises StreamDiverged for a log that contradicts itself.
    """

    attempt: Started
    prompts: list[list[int]]
    completions: Sequence[Completion | Pooled | TextChoice]
    deltas: list[Delta] = field(default_factory=list)
    num_committed: int = 0
    failure: tuple[Failure, ErrorBody] | None = None
    is_spent: bool = False  # the account's budget is spent: open choices end here, without an error
    behind_since_s: float | None = None  # monotonic; None when all that is due is committed
    num_behind: int = 0  # tokens that are not known to be logged
    times: Times = field(default_factory=Times)
    splits: list[int] = field(default_factory=list)  # where pooled prompts that are pairs are split
    words: WordIds = NO_WORDS
    structure: StructuredOutputs | None = None  # what the job's answers are held to
    _num_open: int = 0  # choices that are not finished
    _pending: dict[int, TextPiece] = field(default_factory=dict)
    _num_cached: dict[int, int] = field(default_factory=dict)
    _checksum: int = EMPTY

    def __post_init__(self) -> None:
        self.deltas = list(self.attempt.log)
        self.num_committed = len(self.deltas)
        cursor = Cursor(self.job.job_id, 0)
        for delta in self.deltas:
            cursor.take(delta)
            self.completions[delta.index].replay(delta)
        self._checksum = cursor.checksum or EMPTY
        self._num_open = len(self.open_choices())

    @property
    def job(self) -> Job:
        return self.attempt.job

    @property
    def is_delayed(self) -> bool:
        """Return whether its caller asked that it wait."""
        return self.job.delay_ms is not None or self.job.not_before_ms is not None

    @property
    def submitted_ns(self) -> int:
        """Return when it was submitted, as unix time by this machine's clock."""
        return self.times.started_ns - self.attempt.waited_ms * 1_000_000

    @property
    def log_fields(self) -> dict[str, str]:
        return log_fields(self.job.job_id, self.job.traceparent)

    @property
    def position(self) -> int:
        """Return the position of the next delta."""
        return self.deltas[-1].end if self.deltas else 0

    @property
    def has_passed_trial(self) -> bool:
        """Return whether enough is logged to clear a suspect; True for a job that is none."""
        trial = self.attempt.trial
        if trial is None:
            return True
        return self.num_committed > 0 and self.deltas[self.num_committed - 1].end >= trial

    @property
    def is_over(self) -> bool:
        return not self._num_open or self.failure is not None or self.is_spent

    def seq_id(self, index: int) -> str:
        """Return a choice's sequence id, which is unique over attempts at the job.

        So what an earlier attempt's sequence still sends is not taken for this one's.
        """
        return f"{self.job.job_id}:{self.attempt.epoch}:{index}"

    def open_choices(self) -> list[int]:
        return [
            index for index, completion in enumerate(self.completions) if not completion.is_finished
        ]

    def additions(self, cache_salt: bytes) -> list[AddSequence]:
        """Return a sequence for each choice that is not finished, with the ids drawn so far."""
        params, seed, pooling = self.sampling_params(), self.job.seed, self.job.pooling
        num_sequences = params.num_sequences
        if pooling is not None:
            pooling = pooling.model_copy(update={"queries": []})  # they are in the prompts
        return [
            AddSequence(
                seq_id=self.seq_id(index),
                prompt=self.prompts[index // num_sequences],
                params=params,
                seed=seed,
                choice=index,
                completion=self.drawn_ids(index),
                cache_salt=cache_salt,
                priority=_PRIORITIES[self.attempt.priority_class],
                turn=self.attempt.turn,
                pooling=pooling,
                split=self.splits[index] if self.splits else 0,
                words=self.words,
                group=self.seq_id(index - index % num_sequences) if num_sequences > 1 else "",
                owner=self.job.tenant,
                weight=self.attempt.weight,
            )
            for index in self.open_choices()
        ]

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the job's sequences."""
        params = self.job.params
        if self.structure is params.structured_outputs:
            return params
        return params.model_copy(update={"structured_outputs": self.structure})

    @property
    def num_sequences(self) -> int:
        return len(self.completions)

    def has_ended(self, index: int) -> bool:
        return self.completions[index].is_finished

    def drawn_ids(self, index: int) -> list[int]:
        """Return the ids that a sequence has drawn so far."""
        return list(self.completions[index].token_ids)

    def take(self, index: int, output: Output) -> bool:
        """Add a step's output to a choice.

        Return True if a stop string ended the choice before the engine did.
        """
        completion = self.completions[index]
        if completion.is_finished or self.failure is not None or self.is_spent:
            return False
        piece = completion.take(output)
        waiting = self._pending.get(index)
        self._pending[index] = waiting.joined(piece) if waiting else piece
        self._num_cached.setdefault(index, output.num_cached)
        self.num_behind += len(piece.token_ids)
        if self.behind_since_s is None and self._is_due(index):
            self.behind_since_s = time.monotonic()
        if not self.times.first_ns:
            self.times.first_ns = time.time_ns()
        if piece.finish_reason is None:
            return False
        self._num_open -= 1
        if not self._num_open:
            self.times.last_ns = time.time_ns()
        return output.finish_reason is None

    def _is_due(self, index: int) -> bool:
        """Return whether what waits of a choice is to be logged, as `stream_interval` says."""
        num_held = len(self._pending[index].token_ids)
        completion = self.completions[index]
        enough = num_held >= self.job.stream_interval or num_held == len(completion.token_ids)
        return enough or completion.is_finished

    def fail(self, state: Failure, error: ErrorBody) -> None:
        """End the job with an error; the first one wins."""
        self.failure = self.failure or (state, error)

    def cancel(self) -> None:
        self.fail("cancelled", Cancelled("the job was cancelled").body())

    def expire(self) -> None:
        error = DeadlineExceeded("timeout_ms: the job's time was up while it ran", "timeout_ms")
        self.fail("expired", error.body())

    def spend(self) -> None:
        self.is_spent = True

    def cut(self, position: int) -> None:
        """Drop all tokens from a position on: the budget ends there. None of them is logged."""
        self.is_spent = True
        self._seal()
        deltas = [delta for delta in self.deltas if delta.end <= position]
        beyond = self.deltas[len(deltas) :]
        self.deltas, self._checksum = deltas, EMPTY
        self.num_committed = min(self.num_committed, len(deltas))
        self.completions = [completion.anew() for completion in self.completions]
        for delta in deltas:
            self.completions[delta.index].replay(delta)
            self._checksum = roll(self._checksum, delta.index, delta.token_ids)
        if beyond and beyond[0].position < position:
            last, count = beyond[0], position - beyond[0].position
            completion = self.completions[last.index]
            assert isinstance(completion, Completion), "a vector is one token"
            self._pending[last.index] = completion.cut(last, count)
            self._seal()
        self._num_open = len(self.open_choices())
        log_end = self.deltas[self.num_committed - 1].end if self.num_committed else 0
        self.num_behind = self.position - log_end

    def commit(self) -> Commit:
        """Return the deltas that are not logged yet.

        Until `note_committed` new pieces wait, and those of a choice merge.
        """
        if self.num_committed == len(self.deltas):
            self._seal()
        new = self.deltas[self.num_committed :]
        if self.num_committed > len(self.attempt.log):
            return Commit(self.job.job_id, self.attempt.epoch, new)
        usage = self.usage()
        return Commit(
            self.job.job_id, self.attempt.epoch, new, usage.prompt_tokens, usage.cached_tokens
        )

    def note_committed(self, commit: Commit) -> None:
        self.num_committed += len(commit.deltas)
        self.num_behind -= sum([len(delta.token_ids) for delta in commit.deltas])
        self.behind_since_s = time.monotonic() if any(map(self._is_due, self._pending)) else None
        if not self.times.first_committed_ns:
            self.times.first_committed_ns = time.time_ns()

    def ending(self) -> Ending:
        """Return what ends the job, with the deltas that are not logged yet."""
        self._seal()
        position, usage, checksum = self.position, self.usage(), self._checksum
        if num_reasoning := sum(completion.num_reasoning for completion in self.completions):
            usage = usage.model_copy(update={"reasoning_tokens": num_reasoning})
        reason: FinishReason | None = "budget" if self.open_choices() else None
        end: Done | Failed = Done(
            position, usage, checksum=checksum, finish_reason=reason, timing=self.timing()
        )
        if self.failure is not None:
            state, error = self.failure
            end = Failed(
                position=position, state=state, error=error, usage=usage, checksum=checksum
            )
        return Ending(self.job, self.attempt.epoch, self.deltas, self.num_committed, end)

    def timing(self) -> Timing | None:
        """Return how long the job took, over all attempts; None for one without a token."""
        attempt, times = self.attempt, self.times
        first_ms: float | None = attempt.first_token_ms
        if first_ms is None and times.first_ns:
            first_ms = self._since_submission_ms(times.first_ns)
        if first_ms is None:
            return None
        last_ms = self._since_submission_ms(times.last_ns or time.time_ns())
        return Timing(
            queue_ms=attempt.queued_ms,
            prefill_ms=round(max(0, first_ms - attempt.queued_ms), 3),
            decode_ms=round(max(0, last_ms - first_ms), 3),
            num_attempts=attempt.epoch,
        )

    def usage(self) -> Usage:
        """Return the tokens used. A prompt counts once, however many choices answer it."""
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            completion_tokens=self._num_drawn(),
            cached_tokens=sum(self.num_cached(at) for at in range(len(self.prompts))),
        )

    def num_cached(self, prompt: int) -> int:
        """Return how many tokens of a prompt its first sequence found computed."""
        return self._num_cached.get(prompt * self.job.params.num_sequences, 0)

    def _num_drawn(self) -> int:
        """Return the tokens drawn for the completions; each step of a search draws one a beam."""
        lengths, params = (
            [len(completion.token_ids) for completion in self.completions],
            self.job.params,
        )
        if not params.use_beam_search:
            return sum(lengths)
        firsts = range(0, len(lengths), params.n)
        return sum(max(lengths[at : at + params.n]) for at in firsts) * params.num_drawn

    def _since_submission_ms(self, moment_ns: int) -> float:
        return self.attempt.waited_ms + (moment_ns - self.times.started_ns) / 1e6

    def _seal(self) -> None:
        position = self.position
        for index, piece in self._pending.items():
            self._checksum = roll(self._checksum, index, piece.token_ids)
            self.deltas.append(piece.delta(position, index, self._checksum))
            position += len(piece.token_ids)
        self._pending.clear()
