"""vLLM's requests of tokens for tokens: what is read, and what is shown, whole or streamed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue
from pydantic_core import to_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import text_form
from penstock.gateway.openai.responses import AnswerContext, metrics, usage
from penstock.gateway.openai.stream import ReaderPosition, StreamRenderer, finish_json
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.openai.validation import validate
from penstock.schemas.event import Choice, Delta, Result, TokenLogprob, TopLogprob
from penstock.schemas.openai import GenerateRequest, JsonObject

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
# Fields of vLLM's SamplingParams that say how its own parts talk.
_OF_VLLM = ("detokenize", "output_kind", "skip_clone", "skip_reading_prefix_cache")
_FROM_BODY = ("model", "stream", "stream_options", "cache_salt", "priority")


def generate_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a request for tokens. Raises InvalidJob."""
    refuse_unless(NEUTRAL, body, {})
    asked = validate(GenerateRequest, body)
    params = {name: each for name, each in asked.sampling_params.items() if name not in _OF_VLLM}
    text_body: JsonObject = {
        **{name: each for name, each in params.items() if each is not None},
        **{name: body[name] for name in _FROM_BODY if name in body},
        "prompt": list[JsonValue](asked.token_ids),
        "return_token_ids": asked.return_token_ids,
    }
    form = text_form(caller, text_body, job_id)
    return replace(form, shows_text=asked.output_mode == "text")


def generate_answer(form: AnswerContext, result: Result) -> JsonObject:
    return {
        **_head(form),
        "choices": [_choice(form, choice) for choice in result.choices],
        "usage": usage(result.usage),
        **_prompt_of(form, result.choices[0]),
        **metrics(form, result.timing, result.usage),
    }


class TokenChunks(StreamRenderer):
    def __init__(self, form: AnswerContext, seen: ReaderPosition) -> None:
        super().__init__(form, seen)
        self.shows_prompt_ids = form.shows_ids

    def head(self) -> JsonObject:
        return _head(self.form)

    def opening(self, event: Delta) -> list[str]:
        return []

    def pieces(self, event: Delta) -> list[str]:
        shown: JsonObject = {
            "index": event.index,
            "token_ids": list[JsonValue](event.token_ids),
            "logprobs": _logprobs(event.logprobs),
        }
        if self.form.shows_text:
            shown["text"] = event.text
        return [to_json(shown, ensure_ascii=True).decode()[:-1] + ',"finish_reason":null}']

    def closing(self, event: Delta) -> str:
        text = ',"text":""' if self.form.shows_text else ""
        end = finish_json(event.finish_reason, event.stop_reason)
        return f'{{"index":{event.index},"token_ids":[],"logprobs":null{text},{end}}}'


def _head(form: AnswerContext) -> JsonObject:
    return {
        "request_id": f"generate-{form.job.job_id}",
        "output_mode": "text" if form.shows_text else "tokens",
        "created": form.created_s,
        "model": form.job.model,
    }


def _choice(form: AnswerContext, choice: Choice) -> JsonObject:
    shown: JsonObject = {
        "index": choice.index,
        "token_ids": list[JsonValue](choice.token_ids),
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    return shown | ({"text": choice.text} if form.shows_text else {})


def _prompt_of(form: AnswerContext, choice: Choice) -> JsonObject:
    """Return what is asked of the prompt: its ids, and its log probabilities."""
    shown: JsonObject = {}
    if form.shows_ids:
        shown["prompt_token_ids"] = list[JsonValue](choice.prompt_ids or ())
    if form.num_scores is not None:
        shown["prompt_logprobs"] = [
            {str(each.token_id): _ranked(each) for each in (*token.top, token)} if place else None
            for place, token in enumerate(choice.prompt_logprobs or ())
        ]
    return shown


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> JsonObject | None:
    if not tokens:
        return None
    return {"content": [{**_ranked(token), "top_logprobs": _ranks(token.top)} for token in tokens]}


def _ranks(tops: Sequence[TopLogprob]) -> list[JsonValue]:
    return [_ranked(top, rank) for rank, top in enumerate(tops, 1)]


def _ranked(token: TokenLogprob | TopLogprob, rank: int | None = None) -> JsonObject:
    return {"token_id": token.token_id, "logprob": token.logprob, "rank": rank}
