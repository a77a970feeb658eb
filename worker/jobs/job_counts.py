"""The times and sizes of a worker's jobs, counted as they end."""

import secrets
import time
from collections import Counter

from pydantic import JsonValue

from penstock.schemas import names
from penstock.worker.jobs.active_job import ActiveJob

NS_PER_S = 1_000_000_000
MAX_NAME = 64  # of a tenant told apart, since all are sent with each beat


class JobCounts:
    """The counts of one I/O process, over all of its lanes and lease sessions.

    A job counts where it ends, so that it counts once; of a job that another worker had begun, the
    times are of the attempt that ended it. The first `max_tenants` tenants are told apart, and the
    tokens of all others are counted together.
    """

    def __init__(self, max_tenants: int = 0) -> None:
        self._max_tenants = max_tenants
        self._name = secrets.token_hex(4)
        self._tallies = {each.stat: each.tally() for each in names.JOB_HISTOGRAMS}
        self._resumed_tokens = 0
        self._fenced_writes = 0
        self._tenant_tokens = Counter[str]()

    def began(self, active: ActiveJob) -> None:
        self._resumed_tokens += active.started.position

    def committed(self, seconds: float, num_fenced: int) -> None:
        self._tallies["commit_seconds"].observe(seconds)
        self._fenced_writes += num_fenced

    def was_fenced(self) -> None:
        self._fenced_writes += 1

    def ended(self, active: ActiveJob) -> None:
        if active.job.text is not None:
            return  # nothing was computed
        self._note_times(active)
        self._note_sizes(active)
        job, usage = active.job, active.usage()
        known = len(self._tenant_tokens.keys() - {names.OTHER_TENANTS})
        is_apart = job.tenant in self._tenant_tokens or (
            known < self._max_tenants and len(job.tenant) <= MAX_NAME
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
        return {stat: tally.dump() for stat, tally in self._tallies.items()}

    def _note_times(self, active: ActiveJob) -> None:
        started, times, job = active.started, active.times, active.job
        is_first = not started.log and job.delay_ms is None and job.not_before_ms is None
        if is_first:
            waited_ns = started.waited_ms * 1_000_000
            self._observe("queue_seconds", times.started_ns - waited_ns, times.admitted_ns)
        ended_ns = times.last_ns or time.time_ns()
        self._observe("inference_seconds", times.admitted_ns, ended_ns)
        if not times.first_ns:
            return
        self._observe("prefill_seconds", times.admitted_ns, times.first_ns)
        self._observe("decode_seconds", times.first_ns, ended_ns)
        made = Counter({at: len(each.token_ids) for at, each in enumerate(active.completions)})
        for delta in started.log:
            made[delta.index] -= len(delta.token_ids)
        if (after_first := max(made.values()) - 1) > 0:
            per_token_ns = (ended_ns - times.first_ns) // after_first
            self._observe("output_token_seconds", 0, per_token_ns)

    def _note_sizes(self, active: ActiveJob) -> None:
        params, tallies = active.job.params, self._tallies
        for prompt in active.prompts:
            tallies["request_prompt_tokens"].observe(len(prompt))
        lengths = [len(each.token_ids) for each in active.completions]
        for length in lengths:
            tallies["request_generation_tokens"].observe(length)
        tallies["max_generation_tokens"].observe(max(lengths))
        tallies["params_n"].observe(params.n)
        if params.max_tokens is not None:
            tallies["params_max_tokens"].observe(params.max_tokens)

    def _observe(self, stat: str, start_ns: int, end_ns: int) -> None:
        """Observe a span of wall-clock time, which is 0 where the clock was set back in it."""
        self._tallies[stat].observe(max(0, end_ns - start_ns) / NS_PER_S)
