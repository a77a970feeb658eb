"""What a caller is told of a submission that the queue did not take."""

import time

from schemas.delivery import Outcome, Submission
from schemas.errors import (
    BudgetExceeded,
    DeadlineUnmeetable,
    IdempotencyMismatch,
    NoWorker,
    PenstockError,
    QueueFull,
    RateLimited,
)
from schemas.job import Job

DAY_S = 86_400
WHY = {
    "queued": "max_queued: the account has as many jobs waiting as it may; let some end first",
    "rate": "the requests or tokens that the account may use in a minute are used up",
    "budget": "the token budget of the account is used up",
}


def refusal(answer: Submission, job: Job) -> PenstockError | None:
    """The error that an answer stands for; none where the job is in the queue."""
    retry_ms, model = answer.retry_after_ms, job.model
    when = f"try again in {max(1, round(retry_ms / 1000))} s"
    match answer.outcome:
        case Outcome.ACCEPTED | Outcome.DUPLICATE:
            return None
        case Outcome.MISMATCH:
            return IdempotencyMismatch()
        case Outcome.NO_WORKER:
            sentence = f"model: no worker serves {model!r} at present"
            return NoWorker(sentence, "model", retry_after_ms=retry_ms)
        case Outcome.FULL:
            sentence = f"the queue is full: {answer.num_queued} jobs wait"
            if answer.reason == "tokens":
                sentence += ", and their prompts have as many tokens as may wait"
            return QueueFull(f"{sentence}; {when}", retry_after_ms=retry_ms)
        case Outcome.UNMEETABLE:
            late = f"{answer.num_queued} jobs wait, and its time would be up before its turn"
            return DeadlineUnmeetable(f"timeout_ms: {late}; {when}", "timeout_ms", retry_ms)
        case Outcome.LIMITED:
            wait = "" if answer.reason == "queued" else ', or submit with over_limit="wait"'
            sentence = f"{WHY[answer.reason]}; {when}{wait}"
            if answer.reason == "budget":
                reset_at = _next_day(time.time() + retry_ms / 1000)
                return BudgetExceeded(sentence, retry_after_ms=retry_ms, reset_at=reset_at)
            return RateLimited(sentence, retry_after_ms=retry_ms)


def _next_day(about_s: float) -> int:
    """The begin of the day of UTC that lies nearest: budgets renew then, whatever a clock says."""
    return round(about_s / DAY_S) * DAY_S
