"""A job's result, and its events as they come, as Anthropic's message."""

from collections.abc import Iterator

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from penstock.gateway.follow.resumable import START, ReaderPosition, ResumableStream
from penstock.gateway.openai.responses import AnswerContext, metrics, schema_error
from penstock.gateway.openai.texts import TextContext
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import Delta, Done, ErrorBody, Failed, FinishReason, Result, Usage
from penstock.schemas.markup.forms import UNPARSED_KEY
from penstock.schemas.markup.source import CallPiece, Found

_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "budget": "max_tokens",
    "repetition": "end_turn",
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_answer(form: AnswerContext, result: Result) -> JsonObject:
    choice = result.choices[0]
    answer = form.parser.read(choice.text, choice.markup)
    content: list[JsonValue] = []
    if answer.reasoning and form.shows_reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [{**_tool_use(form, call), "input": _input(call.arguments)} for call in answer.calls]
    reason, sequence = _stop(choice.finish_reason, choice.stop_reason, bool(answer.calls))
    return {
        **_head(form),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(result.usage),
        **schema_error(choice.schema_error),
        **metrics(form, result.timing, result.usage),
    }


def count_answer(form: TextContext, result: Result) -> JsonObject:
    return {"input_tokens": len(result.choices[0].prompt_ids or ())}


def error_answer(body: ErrorBody) -> JsonObject:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(body.status, "api_error" if body.status >= 500 else _ERRORS[400])
    return {"type": "error", "error": {"type": kind, "message": body.message, "code": body.code}}


class MessageEvents(ResumableStream):
    """Renders a message as the events of its blocks: thinking, text and the use of tools."""

    def __init__(self, form: AnswerContext, position: ReaderPosition = START) -> None:
        super().__init__(form.job.job_id, position)
        self._form = form
        self._reader = form.parser.reader(None)
        self._is_begun = False
        self._kind = ""  # the open block's kind
        self._num_blocks = 0
        self._num_calls = 0
        self._stop: tuple[str | None, str | None] = (None, None)
        self._schema_error: str | None = None

    def chunks(self, event: Delta) -> list[bytes]:
        chunks = []
        if not self._is_begun:
            self._is_begun = True
            self._reader = self._form.parser.reader(event.markup)
            chunks.append(self._start(event.prompt_tokens or 0))
        chunks += self._blocks(self._reader.feed(event.text))
        if event.finish_reason:
            chunks += self._blocks(self._reader.finish())
            chunks += self._close_block()
            self._stop = _stop(event.finish_reason, event.stop_reason, self._num_calls > 0)
            self._schema_error = event.schema_error
        return chunks

    def ending(self, event: Done) -> bytes:
        chunks = [] if self._is_begun else [self._start(event.usage.prompt_tokens)]
        chunks += self._close_block()
        if self._stop[0] is None:
            self._stop = _stop(event.finish_reason, None, self._num_calls > 0)
        reason, sequence = self._stop
        delta: JsonObject = {"stop_reason": reason, "stop_sequence": sequence}
        delta |= schema_error(self._schema_error)
        fields = metrics(self._form, event.timing, event.usage)
        chunks.append(_event("message_delta", delta=delta, usage=_usage(event.usage), **fields))
        return b"".join([*chunks, _event("message_stop")])

    def render_error(self, error: Failed) -> bytes:
        return b"event: error\ndata: " + to_json(error_answer(error.error)) + b"\n\n"

    def _start(self, num_prompt: int) -> bytes:
        usage = _usage(Usage(prompt_tokens=num_prompt))
        open_end: JsonObject = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(self._form), "content": [], **open_end, "usage": usage}
        return _event("message_start", message=message)

    def _blocks(self, answer: Found) -> Iterator[bytes]:
        if answer.reasoning and self._form.shows_reasoning:
            yield from self._open_block("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=answer.reasoning)
        if answer.content:
            yield from self._open_block("text", {"text": ""})
            yield self._delta("text_delta", text=answer.content)
        for piece in answer.calls:
            if piece.name is not None:
                self._num_calls += 1
                yield from self._close_block()
                yield from self._open_block(
                    "tool_use", {**_tool_use(self._form, piece), "input": {}}
                )
            if piece.arguments:
                yield self._delta("input_json_delta", partial_json=piece.arguments)

    def _open_block(self, kind: str, block: JsonObject) -> Iterator[bytes]:
        """Open a block of a kind, unless the last one is of that kind and still open."""
        if kind == self._kind:
            return
        yield from self._close_block()
        self._kind = kind
        yield self._of_block("content_block_start", content_block={"type": kind, **block})

    def _close_block(self) -> Iterator[bytes]:
        if self._kind:
            yield self._of_block("content_block_stop")
            self._kind = ""
            self._num_blocks += 1

    def _delta(self, kind: str, **fields: JsonValue) -> bytes:
        return self._of_block("content_block_delta", delta={"type": kind, **fields})

    def _of_block(self, kind: str, **fields: JsonValue) -> bytes:
        return _event(kind, index=self._num_blocks, **fields)


def _head(form: AnswerContext) -> JsonObject:
    return {
        "id": f"msg_{form.job.job_id}",
        "type": "message",
        "role": "assistant",
        "model": form.job.model,
    }


def _stop(
    reason: FinishReason | None, stop_reason: int | str | None, has_calls: bool
) -> tuple[str | None, str | None]:
    """Return why a message ended, and the sequence that ended it."""
    if reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    if reason == "stop" and has_calls:
        return "tool_use", None
    return (_STOP_REASONS[reason] if reason else None), None


def _tool_use(form: AnswerContext, piece: CallPiece) -> JsonObject:
    """Return the block's beginning. Its id follows from the job."""
    block_id = f"toolu_{form.job.job_id[-26:]}_{piece.number}"
    return {"type": "tool_use", "id": block_id, "name": piece.name}


def _input(arguments: str) -> JsonValue:
    """Return the input of a tool; of arguments that were cut off, what there is."""
    try:
        value: JsonValue = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {UNPARSED_KEY: arguments}
    return value


def _usage(usage: Usage) -> JsonObject:
    """Return the tokens. Those of the prompt that were found computed are told apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))
