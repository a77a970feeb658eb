"""The errors for submissions that the queue did not take."""

import time

from penstock.schemas.account import Quota
from penstock.schemas.counted import counted
from penstock.schemas.delivery import Outcome, Submission
from penstock.schemas.errors import (
    BudgetExceeded,
    DeadlineUnmeetable,
    IdempotencyMismatch,
    NoWorker,
    PenstockError,
    QueueFull,
    RateLimited,
)
from penstock.schemas.job import Job

DAY_S = 86_400
WHY = {
    "max_queued": "{most}jobs wait, as many as may; let some end first",
    "requests_per_minute": "the {most}requests of this minute are used up",
    "tokens_per_minute": "of the {most}tokens of this minute too few are left for this job",
    "tokens_per_day": "the {most}tokens of this day of UTC are used up",
    "tokens_per_month": "the {most}tokens of this month of UTC are used up",
}
BUDGETS = ("tokens_per_day", "tokens_per_month")


def refusal(answer: Submission, job: Job, limits: Quota | None = None) -> PenstockError | None:
    """Return the error that an answer stands for, or None where the job is in the queue.

    `limits` are those of the whole account, of which a lane enforces its share.
    """
    retry_ms, model = answer.retry_after_ms, job.model
    when = f"try again in {max(1, round(retry_ms / 1000))} s"
    match answer.outcome:
        case Outcome.ACCEPTED | Outcome.DUPLICATE | Outcome.SHARED:
            return None
        case Outcome.MISMATCH:
            return IdempotencyMismatch()
        case Outcome.NO_WORKER:
            sentence = f"model: no worker serves {model!r} at present"
            return NoWorker(sentence, "model", retry_after_ms=retry_ms)
        case Outcome.FULL:
            sentence = f"the queue is full, with {counted(answer.num_queued, 'waiting job')}"
            reason = "max_num_queued_reqs"  # vLLM's words
            if answer.reason == "tokens":
                sentence += ", whose prompts have as many tokens as may wait"
                reason = "max_num_queued_tokens"
            return QueueFull(f"{sentence}; {when}", retry_after_ms=retry_ms, reason=reason)
        case Outcome.UNMEETABLE:
            late = f"behind {counted(answer.num_queued, 'waiting job')} its time would be up"
            return DeadlineUnmeetable(f"timeout_ms: {late}; {when}", "timeout_ms", retry_ms)
        case Outcome.LIMITED:
            limit = (limits or Quota()).model_dump()[answer.reason]
            why = WHY[answer.reason].format(most=f"{limit} " if limit else "")
            sentence = f"{answer.reason}: {why}"
            wait = "" if answer.reason == "max_queued" else ', or submit with over_limit="wait"'
            if answer.reason in BUDGETS:
                reset_at = _next_day(time.time() + retry_ms / 1000)
                renews = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(reset_at))
                sentence = f"{sentence}; they renew at {renews}{wait}"
                return BudgetExceeded(
                    sentence, retry_after_ms=retry_ms, reset_at=reset_at, reason=answer.reason
                )
            return RateLimited(
                f"{sentence}; {when}{wait}", retry_after_ms=retry_ms, reason=answer.reason
            )


def _next_day(about_s: float) -> int:
    """Return the nearest start of a day of UTC, when budgets renew, though clocks may differ."""
    return round(about_s / DAY_S) * DAY_S
