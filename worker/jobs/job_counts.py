"""The tokens, times and sizes of a worker's jobs, by model, counted as they are logged or end."""

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import JsonValue

from penstock.schemas.event import Delta
from penstock.schemas.metrics import names
from penstock.schemas.process.trace_context import sampled_trace
from penstock.worker.jobs.active_job import ActiveJob

NS_PER_S = 1_000_000_000
MAX_NAME = 64  # letters of a tenant's name: all are sent with each beat


class JobCounts:
    """The counts of one I/O process, over all of its lanes and lease sessions.

    Tokens and latencies are counted as they are logged, all else where a job ends: so each counts
    once, at the worker whose write was taken. The first `max_tenants` tenants are told apart, and
    the tokens of all others are counted together.
    """

    def __init__(self, max_tenants: int = 0, models: Iterable[str] = ()) -> None:
        self._max_tenants = max_tenants
        self._name = secrets.token_hex(4)
        self._models = {model: ModelCounts() for model in models}
        self._commits = names.COMMIT_SECONDS.tally()
        self._resumed_tokens = 0
        self._fenced_writes = 0
        self._tenant_tokens = Counter[str]()

    def of(self, model: str) -> "ModelCounts":
        return self._models.setdefault(model, ModelCounts())

    def began(self, active: ActiveJob) -> None:
        self._resumed_tokens += active.attempt.position

    def committed(self, seconds: float, num_fenced: int) -> None:
        self._commits.observe(seconds)
        self._fenced_writes += num_fenced

    def was_fenced(self) -> None:
        self._fenced_writes += 1

    def ended(self, active: ActiveJob) -> None:
        if active.job.text is not None:
            return  # nothing was computed
        job, usage = active.job, active.usage()
        num_tenants = len(self._tenant_tokens.keys() - {names.OTHER_TENANTS})
        is_apart = job.tenant in self._tenant_tokens or (
            num_tenants < self._max_tenants and len(job.tenant) <= MAX_NAME
        )
        tenant = job.tenant if is_apart else names.OTHER_TENANTS
        self._tenant_tokens[tenant] += usage.prompt_tokens + usage.completion_tokens

    def dump(self) -> dict[str, JsonValue]:
        """Return the counts as they go into the worker's statistics."""
        return {
            "counts_of": self._name,  # they go on in the next session, under its incarnation
            "resumed_tokens": self._resumed_tokens,
            "fenced_writes": self._fenced_writes,
            "tenant_tokens": {**self._tenant_tokens},
        }

    def histograms(self) -> dict[str, list[float]]:
        return {names.COMMIT_SECONDS.stat: self._commits.dump()}

    def models(self) -> dict[str, dict[str, JsonValue]]:
        """Return each model's counts; a lane's beat carries those of its own model alone."""
        return {model: counts.dump() for model, counts in self._models.items()}


class ModelCounts:
    """The counts of one model's jobs. Jobs of which nothing is computed are in none of them.

    A choice's first event says that its prompt was read, which counts with its first choice.
    """

    def __init__(self) -> None:
        self._tallies = {metric.stat: metric.tally() for metric in names.JOB_HISTOGRAMS}
        self._tokens = Counter[str]({metric.stat: 0 for metric in names.MODEL_METRICS})
        self._finish_reasons = Counter[str]()

    def logged(self, active: ActiveJob, deltas: Sequence[Delta]) -> None:
        """Count events of a job that are in its log now. Each is to be given once."""
        if active.job.text is not None or not deltas:
            return
        now_ns, seen_ns = time.monotonic_ns(), active.times.logged_ns
        trace_id = sampled_trace(active.job.traceparent)
        if not seen_ns and not active.attempt.log and not active.is_delayed:
            self._observe("ttft_seconds", active.submitted_ns, time.time_ns(), trace_id)
        for delta in deltas:
            if (last_ns := seen_ns.get(delta.index)) is not None:
                self._observe("inter_token_seconds", last_ns, now_ns, trace_id)
            else:
                self._note_first(active, delta.index)
            seen_ns[delta.index] = now_ns
            self._tokens["generation_tokens"] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish_reasons[delta.finish_reason] += 1

    def ended(self, active: ActiveJob) -> None:
        """Count an end that was taken; of a job gone on with, its times are this attempt's."""
        if active.job.text is not None:
            return
        self._note_times(active)
        self._note_sizes(active)
        num_unshown = active.usage().completion_tokens - active.position
        self._tokens["generation_tokens"] += max(0, num_unshown)

    def dump(self) -> dict[str, JsonValue]:
        tallies = self._tallies.items()
        return {
            **self._tokens,
            "finish_reasons": {**self._finish_reasons},
            "histograms": {stat: [*tally.dump()] for stat, tally in tallies},
            "examples": {stat: tally.example.dump() for stat, tally in tallies if tally.example},
        }

    def _note_first(self, active: ActiveJob, index: int) -> None:
        prompt, choice = divmod(index, active.job.params.n)
        if choice or any(delta.index == index for delta in active.attempt.log):
            return
        self._tokens["prompt_tokens"] += len(active.prompts[prompt])
        self._tokens["cached_tokens"] += active.num_cached(prompt)

    def _note_times(self, active: ActiveJob) -> None:
        attempt, times = active.attempt, active.times
        if not active.is_delayed:
            trace_id = sampled_trace(active.job.traceparent)
            self._observe("e2e_seconds", active.submitted_ns, time.time_ns(), trace_id)
            if not attempt.log:
                self._observe("queue_seconds", active.submitted_ns, times.admitted_ns)
        ended_ns = times.last_ns or time.time_ns()
        self._observe("inference_seconds", times.admitted_ns, ended_ns)
        if not times.first_ns:
            return
        self._observe("prefill_seconds", times.admitted_ns, times.first_ns)
        self._observe("decode_seconds", times.first_ns, ended_ns)
        lengths = Counter(
            {at: len(completion.token_ids) for at, completion in enumerate(active.completions)}
        )
        for delta in attempt.log:
            lengths[delta.index] -= len(delta.token_ids)
        if (after_first := max(lengths.values()) - 1) > 0:
            per_token_ns = (ended_ns - times.first_ns) // after_first
            self._observe("output_token_seconds", 0, per_token_ns)

    def _note_sizes(self, active: ActiveJob) -> None:
        params, tallies = active.job.params, self._tallies
        for prompt in active.prompts:
            tallies["request_prompt_tokens"].observe(len(prompt))
        lengths = [len(completion.token_ids) for completion in active.completions]
        for length in lengths:
            tallies["request_generation_tokens"].observe(length)
        tallies["max_generation_tokens"].observe(max(lengths))
        tallies["params_n"].observe(params.n)
        if params.max_tokens is not None:
            tallies["params_max_tokens"].observe(params.max_tokens)

    def _observe(self, stat: str, start_ns: int, end_ns: int, trace_id: str | None = None) -> None:
        """Observe a span of the wall clock; it is 0 where the clock was set back meanwhile."""
        self._tallies[stat].observe(max(0, end_ns - start_ns) / NS_PER_S, trace_id)
