"""Results and their parts in OpenAI's shapes: whole answers, usage, log probabilities, errors."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue
from pydantic_core import from_json

from penstock.gateway.markup.reader import Reading
from penstock.schemas.api.openai import JsonObject, StreamOptions
from penstock.schemas.event import (
    Choice,
    ErrorBody,
    FinishReason,
    Result,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from penstock.schemas.job import Job
from penstock.schemas.markup.forms import CUSTOM_INPUT
from penstock.schemas.markup.source import CallPiece, Found
from penstock.schemas.model import ModelCard

SERVICE_TIERS = {"high": "priority", "normal": "default", "batch": "flex"}
BYTES_A_TOKEN = 64  # bytes of a result's JSON, by a guess
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """A job that was asked for, and how its answer shall look."""

    job: Job
    options: StreamOptions
    parser: Reading = Reading()  # noqa: RUF009 - frozen
    echo: Sequence[str] | None = None  # prompts to show before the answers; none of ids is here
    shows_ids: bool = False  # the token ids of prompts and choices
    shows_text: bool = True  # the text of tokens that were asked for as tokens
    names_ids: bool = False  # log probabilities name tokens by their ids
    is_streamed: bool = False
    shows_metrics: bool = False
    num_scores: int | None = None  # alternatives a token in `prompt_logprobs`; None: not shown
    num_echoed: int | None = None  # the same in the echo's log probabilities
    hides_completion: bool = False  # only the prompt is shown
    shows_reasoning: bool = True
    calls_functions: bool = False  # the older form: one `function_call`, without an id
    is_kept: bool = False  # the job is kept with its result, for who asks again
    ignored_names: Sequence[str] = ()  # fields of the body that mean nothing here
    # the namespace and the own name of a tool that has one, by its name in the job
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fingerprint: str = ""  # the model's weights and numerics; "" where it is not known
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def system_fingerprint(self) -> str | None:
        return f"fp_{self.fingerprint[:10]}" if self.fingerprint else None

    def echo_of(self, index: int, scores: Sequence[TokenLogprob] | None) -> str:
        """Return the text before a choice. That of a prompt of ids is in its log probabilities."""
        if self.echo is None:
            return ""
        if self.echo:
            return self.echo[index // self.job.params.n]
        return b"".join(bytes(token.bytes) for token in scores or ()).decode(errors="replace")

    def shown_end(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> tuple[FinishReason | None, int | str | None]:
        """Return how a choice ends: by its length where none of its tokens is shown."""
        return ("length", None) if self.hides_completion else (finish_reason, stop_reason)


class TimedJob(Protocol):
    """A job that was asked for, and whether its answer tells how long it took."""

    @property
    def job(self) -> Job: ...

    @property
    def shows_metrics(self) -> bool: ...


def num_bytes_of(result: Result) -> int:
    """Return about how many bytes its JSON has; a token with log probabilities has many."""
    return sum(
        len(choice.token_ids) * BYTES_A_TOKEN * (20 if choice.logprobs else 1)
        + len(choice.prompt_logprobs or ()) * BYTES_A_TOKEN * 20
        + len(choice.vector or "")
        for choice in result.choices
    )


def chat_answer(form: AnswerContext, result: Result) -> JsonObject:
    return {
        "id": f"chatcmpl-{form.job.job_id}",
        "object": "chat.completion",
        "created": form.created_s,
        "model": form.job.model,
        "system_fingerprint": form.system_fingerprint,
        "service_tier": service_tier(form.job),
        "choices": [_chat_choice(form, choice) for choice in result.choices],
        "usage": usage(result.usage),
        **prompt_logprobs(form, result.choices[0]),
        **prompt_ids(form, result.choices[0]),
        **metrics(form, result.timing, result.usage),
    }


def text_answer(form: AnswerContext, result: Result) -> JsonObject:
    return {
        "id": f"cmpl-{form.job.job_id}",
        "object": "text_completion",
        "created": form.created_s,
        "model": form.job.model,
        "system_fingerprint": form.system_fingerprint,
        "choices": [_text_choice(form, choice) for choice in result.choices],
        "usage": usage(result.usage),
        **metrics(form, result.timing, result.usage),
    }


def _text_choice(form: AnswerContext, choice: Choice) -> JsonObject:
    if form.hides_completion:
        blank: JsonObject = {"text": "", "token_ids": [], "logprobs": None}
        choice = choice.model_copy(update=blank)
    logprobs = TextLogprobs(form)
    echo = logprobs.echo(choice.index, choice.prompt_logprobs)
    reason, stop_reason = form.shown_end(choice.finish_reason, choice.stop_reason)
    return {
        "index": choice.index,
        "text": form.echo_of(choice.index, choice.prompt_logprobs) + choice.text,
        "logprobs": _one_after_other(echo, logprobs.next(choice.logprobs)),
        "finish_reason": reason,
        "stop_reason": stop_reason,
        **schema_error(choice.schema_error),
        **_token_ids(form, choice),
        **prompt_logprobs(form, choice),
    }


def schema_error(reason: str | None) -> JsonObject:
    """Return why an answer is not what its schema says; nothing where it is, or has none."""
    return {} if reason is None else {"schema_error": reason}


def prompt_logprobs(form: AnswerContext, choice: Choice) -> JsonObject:
    """Return the log probabilities of the choice's prompt, by token ids, under vLLM's name."""
    if form.num_scores is None:
        return {}
    scores: list[JsonValue] = [
        _by_id(token, form.num_scores) if place else None
        for place, token in enumerate(choice.prompt_logprobs or ())
    ]
    return {"prompt_logprobs": scores}


def _by_id(token: TokenLogprob, num_top: int) -> JsonObject:
    """Return a token and its alternatives by their ids; a rank that is not known is null."""
    candidates = [*enumerate(token.top[:num_top], 1), (None, token)]
    by_id: JsonObject = {}
    for rank, entry in candidates:
        shape: JsonObject = {"logprob": entry.logprob, "rank": rank, "decoded_token": entry.token}
        by_id.setdefault(str(entry.token_id), shape)
    return by_id


def _one_after_other(
    first: Mapping[str, list[JsonValue]] | None, then: Mapping[str, list[JsonValue]] | None
) -> JsonObject | None:
    if first is None or then is None:
        return {**(first or then or {})} or None
    return {name: first[name] + then[name] for name in first}


def prompt_ids(form: AnswerContext, choice: Choice) -> JsonObject:
    """Return the ids of a chat's prompt, which vLLM shows once, beside the choices."""
    return {"prompt_token_ids": [*(choice.prompt_ids or ())]} if form.shows_ids else {}


def _token_ids(form: AnswerContext, choice: Choice) -> JsonObject:
    if not form.shows_ids:
        return {}
    return {"prompt_token_ids": [*(choice.prompt_ids or ())], "token_ids": [*choice.token_ids]}


def model_shape(card: ModelCard, num_workers: int) -> JsonObject:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "penstock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "context": card.max_model_len,
        "task": card.task,
        "numerics": card.features.get("numerics") or None,
        "num_workers": num_workers,
    }


def usage(count: Usage) -> JsonObject:
    return {
        "prompt_tokens": count.prompt_tokens,
        "completion_tokens": count.completion_tokens,
        "total_tokens": count.prompt_tokens + count.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": count.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": count.reasoning_tokens},
    }


def metrics(form: TimedJob, timing: Timing | None, count: Usage) -> JsonObject:
    """Return how long the answer took, under vLLM's names, where it was asked for.

    As vLLM's do, `time_to_first_token_ms` counts from the job's start, after its wait in the queue,
    and `tokens_per_second` over the time from there to the last token. Of several choices nobody
    can say how far apart their tokens came, so `mean_itl_ms` is of one.
    """
    if not form.shows_metrics or timing is None:
        return {}
    num_tokens, made_ms = count.completion_tokens, timing.decode_ms
    shape: JsonObject = {
        "queue_time_ms": timing.queue_ms,
        "time_to_first_token_ms": timing.prefill_ms,
        "generation_time_ms": made_ms,
        "num_attempts": timing.num_attempts,
    }
    if form.job.num_choices == 1 and num_tokens > 1:
        shape["mean_itl_ms"] = round(made_ms / (num_tokens - 1), 3)
    if took_ms := timing.prefill_ms + made_ms:
        shape["tokens_per_second"] = round(num_tokens / took_ms * 1000, 3)
    return {"metrics": shape}


def error(body: ErrorBody, more: Mapping[str, JsonValue] | None = None) -> JsonObject:
    kind = "invalid_request_error" if body.status < 500 else "server_error"
    shape: JsonObject = {
        "message": body.message,
        "type": ERROR_TYPES.get(body.status, kind),
        "param": body.param,
        "code": body.code,
        **(more or {}),
    }
    if body.reset_at is not None:
        shape["reset_at"] = body.reset_at
    return {"error": shape}


def service_tier(job: Job) -> str:
    """Return OpenAI's name for the job's class."""
    return SERVICE_TIERS[job.priority_class]


def finish_reason(form: AnswerContext, reason: FinishReason | None, num_calls: int) -> str | None:
    if reason == "stop" and num_calls:
        return "function_call" if form.calls_functions else "tool_calls"
    return reason


def tool_call(form: AnswerContext, choice: int, piece: CallPiece) -> JsonObject:
    """Return a call of a tool, or a later piece of one, in OpenAI's shape.

    Its id follows from the job, so an answer that is made again from the job's result has the same.
    """
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    call_id = f"call_{form.job.job_id[-26:]}_{choice}_{piece.number}"
    if piece.name in form.parser.whole:
        custom: JsonObject = {"name": piece.name, "input": _custom_input(piece.arguments)}
        return {"id": call_id, "type": "custom", "custom": custom}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


def _custom_input(arguments: str) -> str:
    """Return the text that a custom tool gets; of broken arguments, themselves."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def chat_logprobs(form: AnswerContext, tokens: Sequence[TokenLogprob] | None) -> JsonObject | None:
    if not tokens:
        return None

    def shape(token: TokenLogprob | TopLogprob) -> JsonObject:
        name = (_id_of if form.names_ids else _text_of)(token)
        return {"token": name, "logprob": token.logprob, "bytes": list[JsonValue](token.bytes)}

    return {
        "content": [
            {**shape(token), "top_logprobs": [shape(top) for top in token.top]} for token in tokens
        ],
        "refusal": None,
    }


class TextLogprobs:
    """Makes the four parallel lists in which completions give log probabilities.

    An answer's text begins after its echo.
    """

    def __init__(self, form: AnswerContext) -> None:
        self._form = form
        self._begin = 0  # where the answer's text begins
        self._offset = 0  # the sum of the spellings, of tokens whose offset is not known
        self._name = _id_of if form.names_ids else _text_of

    def echo(
        self, index: int, scores: Sequence[TokenLogprob] | None
    ) -> dict[str, list[JsonValue]] | None:
        """Return those of a choice's prompt, where it is shown with them.

        The first token has nothing before it: its log probability is null.
        """
        count, lists = self._form.num_echoed, None
        if self._form.echo is not None and count is not None and scores:
            lists = self.next([token.with_fewer(count) for token in scores])
            assert lists is not None
            lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._begin = self._offset = len(self._form.echo_of(index, scores))
        return lists

    def next(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, list[JsonValue]] | None:
        if not tokens:
            return None
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [self._offset_of(token) for token in tokens],
        }

    def _alternatives(self, token: TokenLogprob) -> JsonObject:
        """Return the log probabilities of a token and its alternatives, by their texts or ids.

        The token itself comes first. Of two with the same text the likelier one counts.
        """
        alternatives = {self._name(token): token.logprob}
        for top in token.top:
            name = self._name(top)
            alternatives[name] = max(top.logprob, alternatives.get(name, top.logprob))
        return {**alternatives}

    def _offset_of(self, token: TokenLogprob) -> int:
        if token.offset is not None:
            return self._begin + token.offset
        self._offset += len(token.token)
        return self._offset - len(token.token)


def _chat_choice(form: AnswerContext, choice: Choice) -> JsonObject:
    answer = form.parser.read(choice.text, choice.markup)
    calls = [tool_call(form, choice.index, call) for call in answer.calls]
    return {
        "index": choice.index,
        "message": _message(form, answer, calls),
        "logprobs": chat_logprobs(form, choice.logprobs),
        "finish_reason": finish_reason(form, choice.finish_reason, len(calls)),
        "stop_reason": choice.stop_reason,
        **schema_error(choice.schema_error),
        **({"token_ids": [*choice.token_ids]} if form.shows_ids else {}),
    }


def _message(form: AnswerContext, answer: Found, calls: list[JsonObject]) -> JsonObject:
    content, reasoning = form.echo_of(0, None) + answer.content, answer.reasoning
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if reasoning and form.shows_reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls and form.calls_functions:
        message |= {"content": content or None, "function_call": calls[0]["function"]}
    elif calls:
        message |= {"content": content or None, "tool_calls": list[JsonValue](calls)}
    return message


def _text_of(token: TokenLogprob | TopLogprob) -> str:
    return token.token


def _id_of(token: TokenLogprob | TopLogprob) -> str:
    return f"token_id:{token.token_id}"
