"""Reading of requests in OpenAI's forms: each gives a job, and how its answer shall look."""

from collections.abc import Sequence

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.ignored import ignored
from penstock.gateway.openai.pooling import vectors_form
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.to_job import (
    chat_job,
    hides_completion,
    in_newer_form,
    prompts_of,
    reading_of,
    text_job,
)
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.openai import ChatRequest, CompletionRequest, JsonObject, StreamOptions
from penstock.schemas.job import Job

CHAT_KEY = "chat"  # under which a stored chat's job repeats the request, but for its messages
_OF_VECTORS = {"input", "documents", "text_2", "data_2"}


def chat_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a chat request. Raises InvalidJob."""
    original = validate(ChatRequest, body)
    request = in_newer_form(original)
    job = chat_job(job_id, caller, request, body)
    if request.store:
        fields = {name: value for name, value in body.items() if name != "messages"}
        job = job.model_copy(update={"repeated": {CHAT_KEY: fields}})
    last = request.messages[-1]
    return AnswerContext(
        job,
        request.stream_options or StreamOptions(),
        reading_of(request),
        echo=[last.text] if request.echo and last.role == "assistant" else None,
        calls_functions=bool(request.functions),
        is_streamed=request.stream,
        shows_metrics=request.include_metrics,
        num_scores=request.prompt_logprobs,
        shows_reasoning=request.include_reasoning,
        shows_ids=request.return_token_ids,
        names_ids=request.return_tokens_as_token_ids,
        is_kept=request.store,
        ignored_names=ignored(original, body),
    )


def text_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a completion request. Raises InvalidJob."""
    request = validate(CompletionRequest, body)
    job = text_job(job_id, caller, request, body)
    prompts = prompts_of(request.prompt) if request.echo else []
    echo = [prompt for prompt in prompts if isinstance(prompt, str)] if request.echo else None
    return AnswerContext(
        job,
        request.stream_options or StreamOptions(),
        echo=echo,
        shows_ids=request.return_token_ids,
        names_ids=request.return_tokens_as_token_ids,
        is_streamed=request.stream,
        shows_metrics=request.include_metrics,
        num_scores=request.prompt_logprobs,
        num_echoed=request.logprobs,
        hides_completion=hides_completion(body),
        ignored_names=ignored(request, body),
    )


def any_job(job_id: str, caller: Caller, body: JsonObject) -> tuple[Job, Sequence[str]]:
    """Return the job of a chat, of vectors or else of a completion, as the body's fields tell.

    The other value is the names of fields that are ignored. Raises InvalidJob.
    """
    if "prompt" not in body and "messages" not in body and not body.keys().isdisjoint(_OF_VECTORS):
        return vectors_form(caller, body, job_id).job, ()
    form = (chat_form if "messages" in body else text_form)(caller, body, job_id)
    return form.job, form.ignored_names
