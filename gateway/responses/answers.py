"""A job's result, and its events as they come, as OpenAI's response."""

from collections.abc import Iterator

from pydantic_core import to_json

from penstock.gateway.follow.resumable import START, ReaderPosition, ResumableStream
from penstock.gateway.openai.responses import AnswerContext, metrics, schema_error, service_tier
from penstock.gateway.responses.items import Items, Told
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import (
    Delta,
    Done,
    EndState,
    ErrorBody,
    Event,
    Failed,
    FinishReason,
    Result,
    Timing,
    Usage,
)

PREFIX = "resp_"  # an id begins with it, before the job's
_CUT = ("length", "budget")


def response_answer(form: AnswerContext, result: Result) -> JsonObject:
    choice = result.choices[0]
    items, reader = Items(form), form.parser.reader(choice.markup)
    for _ in items.take(reader.feed(choice.text), choice.logprobs):
        pass
    for _ in items.take(reader.finish(), None):
        pass
    for _ in items.close(_item_status(choice.finish_reason)):
        pass
    answer = _ended_answer(form, items, choice.finish_reason, result.usage, result.timing)
    return answer | schema_error(choice.schema_error)


class ResponseEvents:
    """Makes the events of a response, numbered from 0."""

    def __init__(self, form: AnswerContext, after: int = -1) -> None:
        """Begin for a caller who has the events up to the number `after`."""
        self._form = form
        self._after = after
        self._items = Items(form)
        self._reader = form.parser.reader(None)
        self._reason: FinishReason | None = None
        self._schema_error: str | None = None
        self._is_begun = False
        self._num_events = 0

    def steps(self, event: Event) -> Iterator[JsonObject]:
        """Yield what a job's next event brings, but for what the caller has."""
        for kind, fields in self._steps(event):
            number, self._num_events = self._num_events, self._num_events + 1
            if number > self._after:
                yield {"type": kind, "sequence_number": number, **fields}

    def _steps(self, event: Event) -> Iterator[Told]:
        if not self._is_begun:
            self._is_begun = True
            if isinstance(event, Delta):
                self._reader = self._form.parser.reader(event.markup)
            for name in ("created", "in_progress"):
                yield f"response.{name}", {"response": _head(self._form, "in_progress")}
        if isinstance(event, Delta):
            yield from self._items.take(self._reader.feed(event.text), event.logprobs)
            if event.finish_reason:
                self._reason, self._schema_error = event.finish_reason, event.schema_error
                yield from self._items.take(self._reader.finish(), None)
                yield from self._items.close(_item_status(event.finish_reason))
            return
        if isinstance(event, Done):
            reason = self._reason or event.finish_reason
            yield from self._items.close(_item_status(reason))
            whole = _ended_answer(self._form, self._items, reason, event.usage, event.timing)
            whole |= schema_error(self._schema_error)
        else:
            yield from self._items.close("incomplete")
            whole = _head(self._form, "failed") | _failure(event.state, event.error)
            whole |= {"output": [*self._items.items]}
        status = "failed" if isinstance(event, Failed) else whole["status"]
        yield f"response.{status}", {"response": whole}


class ResponseStream(ResumableStream):
    """Renders a response's events as server-sent ones."""

    def __init__(
        self, form: AnswerContext, position: ReaderPosition = START, after: int = -1
    ) -> None:
        super().__init__(form.job.job_id, position)
        self._events = ResponseEvents(form, after)

    def chunks(self, event: Event) -> list[bytes]:
        return [
            b"event: %b\ndata: %b\n\n" % (f"{step['type']}".encode(), to_json(step))
            for step in self._events.steps(event)
        ]

    def ending(self, event: Done) -> bytes:
        return b"".join(self.chunks(event))

    def render_error(self, error: Failed) -> bytes:
        return b"".join(self.chunks(error))


def _ended_answer(
    form: AnswerContext,
    items: Items,
    reason: FinishReason | None,
    usage: Usage,
    timing: Timing | None,
) -> JsonObject:
    is_cut = reason in _CUT
    took_ms = timing.queue_ms + timing.prefill_ms + timing.decode_ms if timing else None
    ended_s = None if is_cut or took_ms is None else form.created_s + int(took_ms / 1000)
    return {
        **_head(form, "incomplete" if is_cut else "completed"),
        "completed_at": ended_s,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [*items.items],
        "usage": _usage(usage),
        **metrics(form, timing, usage),
    }


def _head(form: AnswerContext, status: str) -> JsonObject:
    return {
        "id": f"{PREFIX}{form.job.job_id}",
        "object": "response",
        "created_at": form.created_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": form.job.model,
        "output": [],
        "service_tier": service_tier(form.job),
        "usage": None,
        **form.job.repeated,
    }


def _item_status(reason: FinishReason | None) -> str:
    return "incomplete" if reason in _CUT else "completed"


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def running_answer(form: AnswerContext, status: str) -> JsonObject:
    """Return a response that is not made yet."""
    return _head(form, status)


def as_called(body: ErrorBody) -> ErrorBody:
    """Return an engine's error with the name that a field has in a request for a response."""
    if body.param != "max_tokens":
        return body
    message = body.message.replace("max_tokens", "max_output_tokens")
    return body.model_copy(update={"param": "max_output_tokens", "message": message})


def failed_answer(form: AnswerContext, result: Result) -> JsonObject:
    """Return a response that was cancelled or failed, with what there is of it."""
    assert result.error is not None
    cut: JsonObject = {"completed_at": None, "incomplete_details": None}
    return response_answer(form, result) | cut | _failure(result.state, result.error)


def _failure(state: EndState, error: ErrorBody) -> JsonObject:
    """Return how a response tells that its job failed, or was cancelled."""
    if state == "cancelled":
        return {"status": "cancelled", "error": None}
    return {"status": "failed", "error": {"code": error.code, "message": as_called(error).message}}
