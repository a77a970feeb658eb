"""The spans of a job in one worker: its wait, and an attempt with its prefill and its decoding."""

import hashlib
import time

from penstock.schemas.process.spans import SpanKind, Tracing, failed, link_to
from penstock.worker.jobs.active_job import ActiveJob

NS_PER_MS = 1_000_000


class JobSpans:
    """Makes the spans of each attempt at a job when it is over, from times that were noted.

    An attempt's span has an id that follows from the job and its epoch. So an attempt that goes on
    with a job links to the one before it, even if that one's worker died and sent nothing.
    """

    def __init__(self, tracing: Tracing, incarnation: str) -> None:
        self._tracing = tracing
        self._incarnation = incarnation

    def ended(self, active: ActiveJob, outcome: str) -> None:
        """Make the spans of an attempt that ends now.

        `outcome` is the job's state, or what became of the attempt: handed_back, lost.
        """
        attempt, times, now_ns = active.attempt, active.times, time.time_ns()
        job, epoch = attempt.job, attempt.epoch
        parent, usage = job.traceparent, active.usage()
        names = {"penstock.job.id": job.job_id, "gen_ai.request.model": job.model}
        links = []
        if parent is not None and epoch > 1:
            links.append(link_to(attempt_id(job.job_id, epoch - 1), parent))
        span = self._tracing.start(
            f"attempt {job.model}",
            parent,
            kind=SpanKind.CONSUMER,
            attributes={
                **names,
                "gen_ai.operation.name": "text_completion" if job.chat is None else "chat",
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.choice.count": job.params.n,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [
                    completion.finish_reason or outcome for completion in active.completions
                ],
                "penstock.worker": self._incarnation,
                "penstock.epoch": epoch,
                "penstock.resumed_tokens": attempt.position,
                "penstock.outcome": outcome,
            },
            start_ns=times.started_ns,
            span_id=attempt_id(job.job_id, epoch),
            links=links,
        )
        if not span.is_recording():
            return
        if active.failure is not None:
            failed(span, active.failure[1].code)
        elif outcome == "lost":
            failed(span, outcome)
        if epoch == 1:
            waited_ns = attempt.waited_ms * NS_PER_MS
            self._tracing.record(
                "queue",
                parent or span,
                times.started_ns - waited_ns,
                times.started_ns,
                names | {"penstock.priority_class": attempt.priority_class},
            )
        steps = [
            ("admission", times.started_ns, times.admitted_ns),
            ("prefill", times.admitted_ns, times.first_ns),
            ("commit of the first tokens", times.first_ns, times.first_committed_ns),
            ("decode", times.first_ns, times.last_ns),
            ("commit of the end", times.last_ns, now_ns),
        ]
        for name, start_ns, end_ns in steps:
            if start_ns and end_ns:
                self._tracing.record(name, span, start_ns, end_ns)
        span.end(now_ns)


def attempt_id(job_id: str, epoch: int) -> int:
    """Return the id of an attempt's span."""
    digest = hashlib.blake2b(f"{job_id}:{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) or 1
