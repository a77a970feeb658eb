"""Requests to a model's tokenizer as jobs, and what it makes of them in vLLM's shapes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue
from pydantic_core import from_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.to_job import OPTIONS, made_job
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.openai import OBJECT, AskedOfModel, JsonObject
from penstock.schemas.api.text_requests import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from penstock.schemas.event import Choice, Result
from penstock.schemas.job import Job
from penstock.schemas.params.text import TextParams

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
OF_CHATS: Mapping[str, tuple[JsonValue, ...]] = {"chat_template": ("",)}


@dataclass(frozen=True, slots=True)
class TextContext:
    """A job for the tokenizer that was asked for, and how its answer shall look.

    rendered_job   the job whose prompts are rendered, where it is that which was asked for
    max_model_len  the model's, as its card says
    """

    job: Job
    rendered_job: Job | None = None
    is_streamed: bool = False
    max_model_len: int = 0
    shows_metrics: bool = False
    ignored_names: Sequence[str] = ()  # fields of the body that mean nothing here
    created_s: int = field(default_factory=lambda: int(time.time()))


def tokenize_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a request for the ids of a text or of a chat. Raises InvalidJob."""
    refuse_unless(NEUTRAL, body, {})
    if "messages" in body:
        shows_strings = validate(TokenizeChatRequest, body).return_token_strs
        form = _of(chat_form(caller, body, job_id), shows_strings)
        names = [name for name in form.ignored_names if name != "return_token_strs"]
        return replace(form, ignored_names=names)
    refuse_unless(OF_CHATS, body, {})
    request = validate(TokenizeRequest, body)
    question: dict[str, object] = {
        "prompts": [request.prompt],
        "params": {"add_special_tokens": request.add_special_tokens},
        "text": {"task": "tokenize", "return_token_strs": request.return_token_strs},
    }
    return _tokenizer_form(caller, body, job_id, request, question, "prompt")


def detokenize_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a request for the text of ids. Raises InvalidJob."""
    request = validate(DetokenizeRequest, body)
    question: dict[str, object] = {"prompts": [request.tokens], "text": {"task": "detokenize"}}
    return _tokenizer_form(caller, body, job_id, request, question, "tokens")


def describing_form(caller: Caller, model: str) -> TextContext:
    """Ask for the tokenizer's configuration."""
    question: dict[str, object] = {"prompts": [""], "text": {"task": "describe"}}
    return _tokenizer_form(caller, {}, "", AskedOfModel(model=model), question, "prompt")


def render_chat_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a chat whose prompt is to be rendered. Raises InvalidJob."""
    return _of(chat_form(caller, body, job_id), renders=True)


def render_text_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a completion request whose prompts are to be rendered. Raises InvalidJob."""
    return _of(text_form(caller, body, job_id), renders=True)


def tokenize_answer(form: TextContext, result: Result) -> JsonObject:
    choice = result.choices[0]
    strings: JsonValue = None if choice.token_strs is None else list[JsonValue](choice.token_strs)
    tokens = list[JsonValue](choice.prompt_ids or ())
    return {
        "count": len(tokens),
        "max_model_len": form.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize_answer(form: TextContext, result: Result) -> JsonObject:
    return {"prompt": result.choices[0].text}


def describing_answer(form: TextContext, result: Result) -> JsonObject:
    return OBJECT.validate_python(from_json(result.choices[0].text))


def render_chat_answer(form: TextContext, result: Result) -> JsonObject:
    return _generate_body(form, result.choices[0])


def render_text_answer(form: TextContext, result: Result) -> list[JsonValue]:
    return [_generate_body(form, choice) for choice in result.choices]


def _tokenizer_form(
    caller: Caller,
    body: JsonObject,
    job_id: str,
    request: AskedOfModel,
    question: dict[str, object],
    param: str,
) -> TextContext:
    """Return the form of a job that asks the tokenizer alone.

    param  the caller's name for what it asks about
    """
    whole = {**question, "priority_class": "text", "priority": 0}
    job = made_job(job_id, caller, request, body, whole, {"prompts": param})
    names = {*type(request).model_fields, *OPTIONS, *NEUTRAL} - AskedOfModel.model_fields.keys()
    unknown_names = [name for name in body if name not in names and name != "model"]
    return TextContext(job, ignored_names=unknown_names)


def _of(form: AnswerContext, shows_strings: bool = False, renders: bool = False) -> TextContext:
    """Return the form of a job for the tokenizer that reads another job's prompts."""
    text = TextParams(task="tokenize", return_token_strs=shows_strings)
    params = form.job.params.model_copy(update={"n": 1, "best_of": None})
    only = {
        "text": text,
        "priority_class": "text",
        "priority": 0,
        "params": params,
        "return_token_ids": False,
    }
    return TextContext(
        form.job.model_copy(update=only),
        form.job if renders else None,
        form.is_streamed,
        ignored_names=form.ignored_names,
    )


def _generate_body(form: TextContext, choice: Choice) -> JsonObject:
    """Return what /inference/v1/generate takes; `prompt` is the text that a template made."""
    job = form.rendered_job
    assert job is not None, "render forms keep the job that they render"
    params = job.params.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {
        "request_id": f"{'cmpl' if job.chat is None else 'chatcmpl'}-{form.job.job_id}",
        "model": job.model,
        "token_ids": list[JsonValue](choice.prompt_ids or ()),
        "prompt": choice.text if job.chat is not None else None,
        "sampling_params": params | {"max_tokens": job.params.max_tokens},
        "stream": form.is_streamed,
        "cache_salt": job.cache_salt,
    }
