"""What a caller is told of a submission that the queue did not take."""

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
            sentence = f"the queue is full: {answer.num_queued} jobs wait; {when}"
            return QueueFull(sentence, retry_after_ms=retry_ms)
        case Outcome.UNMEETABLE:
            late = f"{answer.num_queued} jobs wait, and its time would be up before its turn"
            return DeadlineUnmeetable(f"timeout_ms: {late}; {when}", "timeout_ms", retry_ms)
        case Outcome.LIMITED:
            kind = BudgetExceeded if answer.reason == "budget" else RateLimited
            wait = "" if answer.reason == "queued" else ', or submit with over_limit="wait"'
            return kind(f"{WHY[answer.reason]}; {when}{wait}", retry_after_ms=retry_ms)
