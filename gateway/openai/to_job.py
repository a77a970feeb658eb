"""Turns the body of an HTTP request into a Job."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.markup.reader import Reading
from penstock.gateway.openai.unsupported import UNSUPPORTED_NAMES, refuse_unsupported
from penstock.gateway.openai.validation import validate
from penstock.schemas.api.closed_schema import closed
from penstock.schemas.api.openai import (
    AllowedChoice,
    Asked,
    AskedOfModel,
    CallersTool,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    CustomTool,
    ForeignTool,
    FunctionTool,
    JsonObject,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    StructuralTagFormat,
    TextFormat,
)
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import LAST_MS, Job, PriorityClass
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs

# Fields that go from the body into the job under their own names.
SAMPLING = set(SamplingParams.model_fields) - {"logprobs", "structured_outputs"}
STRUCTURES = {
    field.alias or name
    for name, field in StructuredOutputs.model_fields.items()
    if name != "asked_as"
}
OPTIONS = (
    "timeout_ms",
    "queue_timeout_ms",
    "not_before_ms",
    "delay_ms",
    "over_limit",
    "background",
    "cache_salt",
    "prompt_cache_key",
    "metadata",
    "stream_interval",
)

# Fields that ask for one kind of structure: vLLM's older ones, SGLang's and llama.cpp's.
OF_STRUCTURE = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "grammar": "grammar",
}
IN_PARAMS = SAMPLING | OF_STRUCTURE.keys() | UNSUPPORTED_NAMES | {"logprobs", "structured_outputs"}
NEUTRAL_OF_STRUCTURE: dict[str, tuple[JsonValue, ...]] = {
    "regex": ("",),
    "json_schema": ("", {}),
    "ebnf": ("",),
    "grammar": ("",),
}
ONE_OF = (
    "give one of response_format, structured_outputs, regex, json_schema, ebnf, grammar, a guided_"
    " field"
)
LAST_S = LAST_MS // 1000
# The job's fields by the names that callers give them, for `validate`.
CALLER_NAMES = {"prompts": "prompt", "params": "", "chat": ""}
TIERS: dict[str, PriorityClass] = {"priority": "high", "flex": "batch"}


def in_newer_form(request: ChatRequest) -> ChatRequest:
    """Return the request with tools in place of functions, which call one at a time."""
    if not request.functions:
        return request
    call = request.function_call
    tools = [FunctionTool(type="function", function=function) for function in request.functions]
    choice = call if isinstance(call, str) else NamedTool(type="function", function=call)
    return request.model_copy(
        update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    )


def chat_job(job_id: str, caller: Caller, request: ChatRequest, body: JsonObject) -> Job:
    refuse_unsupported(body)
    _refuse_streamed(request, body)
    if request.top_logprobs and not request.logprobs:
        raise InvalidJob("top_logprobs: give logprobs as well", "top_logprobs")
    newer = request.max_completion_tokens
    mode, names = _choice(request)
    sampling = _sampling(request, body)
    if mode == "required" and request.response_format is not None:
        sampling.pop("structured_outputs", None)  # the form of a message, and there is none
    if mode == "required" and "structured_outputs" in sampling:
        raise InvalidJob(f"response_format: {ONE_OF}, a forced tool", "response_format")
    sampling["max_tokens"] = request.max_tokens if newer is None else newer
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs
    tools = request.callers_tools if mode != "none" else []
    chat: JsonObject = {
        "messages": [job_message(message) for message in request.messages],
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": "required" if mode == "required" else "auto",
        "callable_tools": [*names],
        "parallel_tool_calls": request.parallel_tool_calls,
        "template_kwargs": _for_template(request) | request.chat_template_kwargs,
        "chat_template": request.chat_template or None,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    return made_job(job_id, caller, request, body, {"chat": chat, "params": sampling})


def _for_template(request: ChatRequest) -> JsonObject:
    """Return the fields of a chat that only the model's template knows what to do with."""
    fields: JsonObject = {
        "reasoning_effort": request.reasoning_effort,
        "documents": [*request.documents],
    }
    return {name: value for name, value in fields.items() if value}


def text_job(job_id: str, caller: Caller, request: CompletionRequest, body: JsonObject) -> Job:
    refuse_unsupported(body)
    _refuse_streamed(request, body)
    prompts = prompts_of(request.prompt)
    sampling = _sampling(request, body)
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    if request.echo and body.get("truncate_prompt_tokens") is not None:
        sentence = "what is left of a prompt that is cut cannot be shown; leave one of them out"
        raise InvalidJob(f"echo: {sentence}", "echo")
    if request.echo and request.logprobs is not None and sampling.get("suffix"):
        sentence = "with a suffix the prompt has other tokens than its text; leave logprobs out"
        raise InvalidJob(f"echo: {sentence}", "echo")
    is_text = all(isinstance(prompt, str) for prompt in prompts)
    if request.echo and (request.logprobs is not None or not is_text):  # a worker spells the ids
        sampling["prompt_logprobs"] = max(request.logprobs or 0, request.prompt_logprobs or 0)
    if hides_completion(body):
        if sampling.get("prompt_logprobs") is None and not request.echo:
            sentence = "0 goes with echo or prompt_logprobs; else ask for at least 1"
            raise InvalidJob(f"max_tokens: {sentence}", "max_tokens")
        if sampling.get("logprob_token_ids") is not None:
            sentence = "with max_tokens of 0 no token is shown that has them; leave one of them out"
            raise InvalidJob(f"logprob_token_ids: {sentence}", "logprob_token_ids")
        sampling["max_tokens"] = 1
    return made_job(job_id, caller, request, body, {"prompts": prompts, "params": sampling})


def reading_of(request: ChatRequest) -> Reading:
    """Return how the answer to a chat is read."""
    mode, _ = _choice(request)
    if mode == "none":
        return Reading()
    tools = request.callers_tools
    return Reading(
        {tool.function.name: tool.function.parameters for tool in tools},
        frozenset(tool.function.name for tool in tools if isinstance(tool, CustomTool)),
        is_forced=mode == "required",
    )


def hides_completion(body: JsonObject) -> bool:
    """Return whether nothing but the prompt is to be shown.

    One token is drawn all the same, and counted.
    """
    return body.get("max_tokens") == 0 and body["max_tokens"] is not False


def flattened(body: JsonObject) -> JsonObject:
    """Return the jobs API's body as one of OpenAI's, with the fields of `params` at its top.

    The job is in the background. Raises InvalidJob.
    """
    params = body.get("params", {})
    if not isinstance(params, dict):
        raise InvalidJob("params: must be an object", "params")
    if "messages" in body and "prompt" in body:
        raise InvalidJob("prompt: give either messages or a prompt", "prompt")
    fields = {name: params[name] for name in IN_PARAMS if params.get(name) is not None}
    if "messages" in body and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return {"background": True} | body | fields


def prompts_of(
    prompt: str | list[int] | list[str] | list[list[int]],
) -> Sequence[str | list[int]]:
    """Return a prompt's four forms as one: a list of texts or of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


def made_job(
    job_id: str,
    caller: Caller,
    request: AskedOfModel,
    body: JsonObject,
    question: dict[str, object],
    caller_names: Mapping[str, str] = CALLER_NAMES,
) -> Job:
    """Return the job that asks a question. Raises InvalidJob.

    caller_names  the caller's names for the job's fields, for `validate`
    """
    fields: dict[str, object] = {
        "job_id": job_id,
        "model": request.model,
        "tenant": caller.tenant,
        "traceparent": caller.traceparent,
        "priority_class": caller.bounded(
            request.priority_class or TIERS.get(request.service_tier, "normal")
        ),
        "priority": request.priority,
    }
    if caller.over_limit is not None:
        fields["over_limit"] = caller.over_limit
    if isinstance(request, Asked) and request.return_token_ids:
        fields["return_token_ids"] = True
    fields |= {name: body[name] for name in OPTIONS if name in body}
    if "not_before" in body:
        fields["not_before_ms"] = _unix_ms(body["not_before"])
    return validate(Job, fields | question, caller_names)


def _refuse_streamed(request: ChatRequest | CompletionRequest, body: JsonObject) -> None:
    """Refuse what goes with `stream` alone, and what does not go with it. Raises InvalidJob."""
    if request.stream_options is not None and not request.stream:
        raise InvalidJob("stream_options: goes with stream; give that too", "stream_options")
    if request.stream and body.get("best_of") not in (None, body.get("n", 1)):
        sentence = "the best are known at the end; leave stream out, or ask for n alone"
        raise InvalidJob(f"best_of: {sentence}", "best_of")
    if request.stream and request.prompt_logprobs is not None:
        sentence = "they do not come with stream; leave stream out, or ask for echo and logprobs"
        raise InvalidJob(f"prompt_logprobs: {sentence}", "prompt_logprobs")


def _unix_ms(value: JsonValue) -> int:
    """Return a time as unix milliseconds. Raises InvalidJob.

    It is given as unix seconds, or in ISO 8601 with its zone.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            time = datetime.fromisoformat(value)
            if time.tzinfo is not None:
                return int(time.timestamp() * 1000)
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LAST_S:
        return int(value * 1000)
    forms = "unix seconds, or a time with its zone such as 2030-01-31T12:00:00Z"
    raise InvalidJob(f"not_before: give {forms}", "not_before")


def _sampling(request: Asked, body: JsonObject) -> JsonObject:
    sampling = {name: body[name] for name in SAMPLING if name in body}
    structures = _structures(request, body)
    if len(structures) > 1:
        raise InvalidJob(f"response_format: {ONE_OF}", "response_format")
    if structures:
        sampling["structured_outputs"] = structures[0]
    return sampling


def _structures(request: Asked, body: JsonObject) -> list[JsonValue]:
    """Return all the constraints on the answer's form that the request gives, in any field."""
    structures: list[JsonValue] = []
    form = request.response_format
    origin: JsonObject = {"asked_as": "response_format"}
    if isinstance(form, JsonSchemaFormat):
        schema, is_strict = form.json_schema.schema_, form.json_schema.strict is True
        constraint = closed(schema) if is_strict else schema
        structures.append({"json": constraint, "lenient": not is_strict, **origin})
    elif isinstance(form, StructuralTagFormat):
        structures.append({"structural_tag": form.model_dump(), **origin})
    elif isinstance(form, JsonObjectFormat) and form.schema_ is not None:
        structures.append({"json": form.schema_, "lenient": True, **origin})
    elif form is not None and not isinstance(form, TextFormat):
        structures.append({"json_object": True, **origin})
    own = body.get("structured_outputs")
    if isinstance(own, dict):
        own = {name: own[name] for name in STRUCTURES if own.get(name) is not None}
    if own is not None:
        structures.append(own)
    for name, kind in OF_STRUCTURE.items():
        is_neutral = body.get(name) in NEUTRAL_OF_STRUCTURE.get(name, ())
        if body.get(name) is not None and not is_neutral:
            structures.append({kind: body[name], "asked_as": name})
    return structures


def _choice(request: ChatRequest) -> tuple[Literal["none", "auto", "required"], list[str]]:
    """Return whether tools may or must be called, and which of them may; none: all.

    Raises InvalidJob.
    """
    choice = request.tool_choice
    if isinstance(choice, str):
        mode, names = choice, list[str]()
    elif isinstance(choice, ForeignTool):
        raise _not_run_here(choice.type)
    elif isinstance(choice, AllowedChoice):
        mode, names = choice.allowed_tools.mode, choice.names
        if not names and mode == "required":
            raise _not_run_here(choice.allowed_tools.tools[0].type)
        mode = mode if names else "none"
    else:
        mode, names = "required", choice.names
    tool_names = {tool.function.name for tool in request.callers_tools}
    if (mode == "required" and not tool_names) or not tool_names.issuperset(names):
        name, among = (
            ("function_call", "functions") if request.functions else ("tool_choice", "tools")
        )
        raise InvalidJob(f"{name}: asks for one that is not among {among}", name)
    return mode, names


def _not_run_here(kind: str) -> InvalidJob:
    sentence = f"{kind[:60]!r} is not run here; name a function or a custom tool of the caller's"
    return InvalidJob(f"tool_choice: {sentence}", "tool_choice")


def _tool(tool: CallersTool) -> JsonObject:
    function: JsonObject = tool.function.model_dump(exclude_none=True)
    return {"type": "function", "function": function}


def job_message(message: ChatMessage) -> JsonObject:
    """Return the message as it was given, but for what is null: workers make it plain."""
    return message.model_dump(exclude_none=True)
