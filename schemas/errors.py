"""The errors that a caller can meet.

PenstockError
+-- InvalidJob 400              the job can never run as it is
|   +-- PromptTooLong
|   +-- InputTooLong
|   +-- AnswerTooLarge
|   +-- UnsupportedParameter
|   +-- UnsupportedSchema
|   +-- UnsupportedTask
|   +-- ModelNotFound 404
+-- Unauthorized 401
+-- OutOfScope 403              the key does not allow this
+-- ForeignHost 403             asked under a name that is not the server's
+-- ForeignPage 403             a web page of elsewhere asks
+-- JobNotFound 404
+-- JobGone 410                 it ended, and its result was kept no longer
+-- BodyTooLarge 413
+-- UnreadableBody 415
+-- IdempotencyMismatch 422
+-- Cancelled 499
+-- Unavailable                 nothing is wrong with the job: try again
|   +-- QueueFull 429
|   +-- RateLimited 429         above the account's limits of requests, tokens or waiting jobs
|   +-- BudgetExceeded 429
|   +-- StorageQuotaExceeded 429  the tenant would have more stored than it may
|   +-- DeadlineUnmeetable 429
|   +-- NoWorker 503
|   +-- QueueUnreachable 503
|   |   +-- NotDurable 503      written, perhaps, but not known to be where `durability` wants it
|   +-- GatewayStopped 503      the gateway ended before it could answer
|   +-- ModelChanged 503        another model is served in place of the job's
+-- NotServed 501               this server is not set up for it
+-- DeadlineExceeded 504
|   +-- QueueTimeout
+-- WorkerFailed 500            the fault is the server's, not the caller's
+-- StreamDiverged 500          a log does not continue what was delivered of it
+-- WorkerCrashed 500           the workers that ran the job crashed
"""

from collections.abc import Iterable

from penstock.schemas.counted import counted
from penstock.schemas.event import ErrorBody


class PenstockError(Exception):
    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = self.code  # the reason of a refusal in metrics: one of few

    def body(self) -> ErrorBody:
        return ErrorBody(
            code=self.code,
            message=self.message,
            status=self.status,
            retryable=self.retryable,
            param=self.param,
        )


class InvalidJob(PenstockError):
    code = "invalid_value"
    status = 400


class PromptTooLong(InvalidJob):
    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, param: str = "prompt") -> None:
        # Clients look for the second sentence, to try a model with more room.
        super().__init__(
            f"{param}: {num_tokens} tokens. This model's maximum context length is {limit} tokens,"
            " less what is to come; shorten the prompt, or give truncate_prompt_tokens",
            param,
        )


class InputTooLong(InvalidJob):
    """Raised for a text that is pooled, and longer than its model reads."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"input: a text has {num_tokens} tokens; this model takes at most {limit}; give fewer,"
            " or truncate_prompt_tokens=-1, which cuts off the rest",
            "input",
        )


class AnswerTooLarge(InvalidJob):
    """Raised when a whole answer is more than a result may hold, or may become so."""

    code = "answer_too_large"


class UnsupportedParameter(InvalidJob):
    """Raised for a parameter that is known elsewhere and would have no effect here."""

    code = "unsupported_parameter"

    def __init__(self, param: str, instead: str | None = None) -> None:
        advice = f"use {instead}" if instead else "leave it out"
        super().__init__(f"{param}: has no effect on this server; {advice}", param)


class UnsupportedSchema(InvalidJob):
    """Raised for a JSON Schema that answers cannot be held to."""

    code = "unsupported_schema"


class UnsupportedByEngine(InvalidJob):
    """Raised for a parameter that the engine of the job's model does not obey."""

    code = "unsupported_parameter"

    def __init__(self, param: str) -> None:
        super().__init__(f"{param}: the engine of this model does not obey it; leave it out", param)


class UnsupportedTask(InvalidJob):
    """Raised for a job that wants of a model what it does not make, as text of an embedder."""

    code = "unsupported_task"

    def __init__(self, task: str, available: Iterable[str]) -> None:
        tasks = ", ".join(available)
        super().__init__(f"model: {task} is no task of this model; it has {tasks}", "model")


class ModelNotFound(InvalidJob):
    code = "model_not_found"
    status = 404

    def __init__(self, model: str, available: list[str]) -> None:
        names = ", ".join(sorted(available)) or "none at present"
        super().__init__(f"model: {model!r} is not served here; served: {names}", "model")


class ModelInUse(PenstockError):
    code = "model_in_use"
    status = 409

    def __init__(self, model: str, num_workers: int, num_jobs: int) -> None:
        super().__init__(
            f"model: {model!r} has {counted(num_workers, 'worker')}, and {counted(num_jobs, 'job')}"
            " not ended or not handed on; end its workers and jobs first",
            "model",
        )


class Unauthorized(PenstockError):
    code = "invalid_api_key"
    status = 401


class OutOfScope(PenstockError):
    code = "out_of_scope"
    status = 403


class ForeignHost(PenstockError):
    """Raised while nobody needs a key: a web page may have given the server a name of its own."""

    code = "host_not_allowed"
    status = 403

    def __init__(self, host: str) -> None:
        super().__init__(
            f"Host: {host[:100]!r} is no name of this server; while nobody needs a key,"
            f" --allowed-hosts {host[:100] or 'NAME'} lets callers use it"
        )


class ForeignPage(PenstockError):
    code = "page_not_allowed"
    status = 403

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Origin: a page of {origin[:100]!r} may not ask this here;"
            " --allowed-origins lets pages in"
        )


class JobNotFound(PenstockError):
    code = "job_not_found"
    status = 404

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id!r} is not known here", "job_id")


class JobGone(PenstockError):
    code = "job_gone"
    status = 410

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id!r} ended, and its result was kept no longer", "job_id")


class BodyTooLarge(PenstockError):
    code = "body_too_large"
    status = 413


class UnreadableBody(PenstockError):
    code = "unsupported_encoding"
    status = 415


class IdempotencyMismatch(PenstockError):
    code = "idempotency_mismatch"
    status = 422

    def __init__(self) -> None:
        super().__init__(
            "this idempotency key was used with another body; use a new key", "Idempotency-Key"
        )


class Cancelled(PenstockError):
    code = "cancelled"
    status = 499


class Unavailable(PenstockError):
    retryable = True

    def __init__(
        self,
        message: str,
        param: str | None = None,
        retry_after_ms: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, param)
        self.retry_after_ms = retry_after_ms
        self.reason = reason or self.code


class QueueFull(Unavailable):
    code = "queue_full"
    status = 429


class RateLimited(Unavailable):
    code = "rate_limited"
    status = 429


class BudgetExceeded(Unavailable):
    code = "budget_exceeded"
    status = 429
    retryable = False  # clients that retry by themselves give up long before the period ends

    def __init__(
        self,
        message: str,
        param: str | None = None,
        retry_after_ms: int | None = None,
        reset_at: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, param, retry_after_ms, reason)
        self.reset_at = reset_at

    def body(self) -> ErrorBody:
        return super().body().model_copy(update={"reset_at": self.reset_at})


class StorageQuotaExceeded(Unavailable):
    code = "storage_quota_exceeded"
    status = 429
    retryable = False  # it stays so until something is deleted

    def __init__(self, used_bytes: int, more: int, most: int) -> None:
        super().__init__(
            f"max_stored_bytes: this tenant has {used_bytes} of {most} bytes stored, and this takes"
            f" {more} more; delete files, conversations or stored responses, let batches and"
            " uploads end, or ask the operator for more"
        )


class DeadlineUnmeetable(Unavailable):
    code = "deadline_unmeetable"
    status = 429


class NoWorker(Unavailable):
    code = "no_worker"
    status = 503


class QueueUnreachable(Unavailable):
    code = "queue_unreachable"
    status = 503


class NotDurable(QueueUnreachable):
    """Raised where an answer would promise more than is known. It may be there all the same."""

    code = "not_durable"


class GatewayStopped(Unavailable):
    code = "gateway_stopped"
    status = 503


class NotServed(PenstockError):
    code = "not_served"
    status = 501


class ModelChanged(Unavailable):
    code = "model_changed"
    status = 503


class DeadlineExceeded(PenstockError):
    code = "deadline_exceeded"
    status = 504


class QueueTimeout(DeadlineExceeded):
    code = "queue_timeout"
    retryable = True


class WorkerFailed(PenstockError):
    code = "worker_failed"
    status = 500
    retryable = True


class StreamDiverged(PenstockError):
    """Raised when events do not continue what was delivered. None of them is delivered."""

    code = "stream_diverged"
    status = 500

    def __init__(self, job_id: str, position: int) -> None:
        super().__init__(
            f"job {job_id!r}: what comes after token {position} does not continue the tokens before"
            " it; submit the job again"
        )


class WorkerCrashed(PenstockError):
    code = "worker_crashed"
    status = 500
