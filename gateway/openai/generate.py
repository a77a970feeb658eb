"""vLLM's requests of tokens for tokens: what is read, and what is shown, whole or streamed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import text_form
from penstock.gateway.openai.responses import (
    AnswerContext,
    metrics,
    prompt_ids,
    prompt_logprobs,
    schema_error,
    usage,
)
from penstock.gateway.openai.stream import NO_FINISH, StreamRenderer, finish_json
from penstock.gateway.openai.to_job import IN_PARAMS, hides_completion
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.openai import GenerateRequest, JsonObject
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Choice, Delta, Result, TokenLogprob, TopLogprob

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
# Fields of vLLM's SamplingParams that say how its own parts talk.
_OF_VLLM = {"detokenize", "output_kind", "skip_clone", "skip_reading_prefix_cache"}
_FROM_BODY = ("model", "stream", "stream_options", "cache_salt", "priority", "priority_class")
_FIELDS = {*GenerateRequest.model_fields, *_FROM_BODY, *NEUTRAL, "request_id"}
# Those that are obeyed, or refused by name; an echo would be of text.
_SAMPLING = (IN_PARAMS | {"max_tokens"}) - _OF_VLLM - {"echo"}


def generate_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a request for tokens. Raises InvalidJob."""
    refuse_unless(NEUTRAL, body, {})
    request = validate(GenerateRequest, body)
    sampling: JsonObject = {
        name: value for name, value in request.sampling_params.items() if value is not None
    }
    if hides_completion(sampling):
        sentence = "give at least 1; /v1/completions scores a prompt alone"
        raise InvalidJob(f"max_tokens: {sentence}", "max_tokens")
    unknown_names = [
        *(name for name in body if name not in _FIELDS),
        *(f"sampling_params.{name}" for name in sampling.keys() - _SAMPLING - _OF_VLLM),
    ]
    if request.output_mode == "text" and sampling.get("detokenize") is False:
        sentence = "contradicts output_mode text; leave one of them out"
        raise InvalidJob(f"detokenize: {sentence}", "sampling_params.detokenize")
    text_body: JsonObject = {
        "max_tokens": None,  # as many as the context allows
        **{name: value for name, value in sampling.items() if name in _SAMPLING},
        **{name: body[name] for name in _FROM_BODY if name in body},
        "prompt": list[JsonValue](request.token_ids),
        "return_token_ids": request.return_token_ids,
    }
    form = text_form(caller, text_body, job_id)
    return replace(form, shows_text=request.output_mode == "text", ignored_names=unknown_names)


def generate_answer(form: AnswerContext, result: Result) -> JsonObject:
    return {
        **_head(form),
        "choices": [_choice(form, choice) for choice in result.choices],
        "usage": usage(result.usage),
        **prompt_ids(form, result.choices[0]),
        **prompt_logprobs(form, result.choices[0]),
        **metrics(form, result.timing, result.usage),
    }


class TokenChunks(StreamRenderer):
    tells_prompt_once = True

    def head(self) -> JsonObject:
        return _head(self.form)

    def opening(self, event: Delta) -> list[str]:
        return []

    def pieces(self, event: Delta) -> list[str]:
        return [] if event.finish_reason else [self._piece(event, NO_FINISH)]

    def closing(self, event: Delta) -> str:
        end = finish_json(event.finish_reason, event.stop_reason, event.schema_error)
        return self._piece(event, end)

    def _piece(self, event: Delta, end: str) -> str:
        shape: JsonObject = {
            "index": event.index,
            "token_ids": list[JsonValue](event.token_ids),
            "logprobs": _logprobs(event.logprobs),
        }
        if self.form.shows_text:
            shape["text"] = event.text
        return f"{to_json(shape, ensure_ascii=True).decode()[:-1]},{end}}}"


def _head(form: AnswerContext) -> JsonObject:
    return {
        "request_id": f"generate-{form.job.job_id}",
        "output_mode": "text" if form.shows_text else "tokens",
        "created": form.created_s,
        "model": form.job.model,
    }


def _choice(form: AnswerContext, choice: Choice) -> JsonObject:
    shape: JsonObject = {
        "index": choice.index,
        "token_ids": list[JsonValue](choice.token_ids),
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        **schema_error(choice.schema_error),
        "stop_reason": choice.stop_reason,
    }
    return shape | ({"text": choice.text} if form.shows_text else {})


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> JsonObject | None:
    if not tokens:
        return None
    return {"content": [{**_ranked(token), "top_logprobs": _ranks(token.top)} for token in tokens]}


def _ranks(tops: Sequence[TopLogprob]) -> list[JsonValue]:
    return [_ranked(top, rank) for rank, top in enumerate(tops, 1)]


def _ranked(token: TokenLogprob | TopLogprob, rank: int | None = None) -> JsonObject:
    return {"token_id": token.token_id, "logprob": token.logprob, "rank": rank}
