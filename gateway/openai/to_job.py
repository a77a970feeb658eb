"""Turns the body of an HTTP request into a Job."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.markup.reader import Reading
from penstock.gateway.openai.unsupported import UNSUPPORTED, refuse_unsupported
from penstock.gateway.openai.validation import refuse_extremes, validate
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import LAST_MS, Job, PriorityClass
from penstock.schemas.openai import (
    Asked,
    AskedOfModel,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    JsonObject,
    JsonSchemaFormat,
    NamedTool,
    TextFormat,
    Tool,
)
from penstock.schemas.sampling import SamplingParams, StructuredOutputs

# Fields that go from the body into the job under their own names.
SAMPLING = set(SamplingParams.model_fields) - {"logprobs", "structured_outputs"}
STRUCTURES = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
OPTIONS = (
    "timeout_ms",
    "queue_timeout_ms",
    "not_before_ms",
    "delay_ms",
    "over_limit",
    "background",
    "cache_salt",
    "metadata",
)

# Fields that ask for one kind of structure: vLLM's older ones, SGLang's and llama.cpp's.
OF_STRUCTURE = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
}
IN_PARAMS = SAMPLING | OF_STRUCTURE.keys() | UNSUPPORTED | {"logprobs", "structured_outputs"}
NEUTRAL_OF_STRUCTURE: dict[str, tuple[JsonValue, ...]] = {"regex": ("",), "json_schema": ("", {})}
LAST_S = LAST_MS // 1000
# The job's fields by the names that callers give them, for `validate`.
CALLED = {"prompts": "prompt", "params": "", "chat": ""}
TIERS: dict[str, PriorityClass] = {"priority": "high", "flex": "batch"}


def chat_job(job_id: str, caller: Caller, asked: ChatRequest, body: JsonObject) -> Job:
    refuse_unsupported(body)
    _refuse_streamed_scores(asked)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidJob("top_logprobs: give logprobs as well", "top_logprobs")
    newer = asked.max_completion_tokens
    sampling = _sampling(asked, body, _forced_call(asked))
    sampling["max_tokens"] = asked.max_tokens if newer is None else newer
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs
    tools = asked.tools if asked.tool_choice != "none" else []
    chat: JsonObject = {
        "messages": [_message(message) for message in asked.messages],
        "tools": [tool.model_dump(exclude_none=True) for tool in tools],
        "template_kwargs": _for_template(asked) | asked.chat_template_kwargs,
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
    }
    refuse_extremes(chat)  # tools' arguments came as texts, which are parsed now
    return made_job(job_id, caller, asked, body, {"chat": chat, "params": sampling})


def _for_template(asked: ChatRequest) -> JsonObject:
    """Return the fields of a chat that only the model's template knows what to do with."""
    given: JsonObject = {
        "reasoning_effort": asked.reasoning_effort,
        "documents": [*asked.documents],
    }
    return {name: value for name, value in given.items() if value}


def text_job(job_id: str, caller: Caller, asked: CompletionRequest, body: JsonObject) -> Job:
    refuse_unsupported(body)
    _refuse_streamed_scores(asked)
    prompts = prompts_of(asked.prompt)
    sampling = _sampling(asked, body, None)
    if asked.logprobs is not None:
        sampling["logprobs"] = asked.logprobs
    if asked.echo and body.get("truncate_prompt_tokens") is not None:
        sentence = "what is left of a prompt that is cut cannot be shown; leave one of them out"
        raise InvalidJob(f"echo: {sentence}", "echo")
    is_text = all(isinstance(prompt, str) for prompt in prompts)
    if asked.echo and (asked.logprobs is not None or not is_text):  # a worker spells the ids
        sampling["prompt_logprobs"] = max(asked.logprobs or 0, asked.prompt_logprobs or 0)
    if hides_completion(body):
        if sampling.get("prompt_logprobs") is None and not asked.echo:
            sentence = "0 goes with echo or prompt_logprobs; else ask for at least 1"
            raise InvalidJob(f"max_tokens: {sentence}", "max_tokens")
        sampling["max_tokens"] = 1
    return made_job(job_id, caller, asked, body, {"prompts": prompts, "params": sampling})


def reading_of(asked: ChatRequest) -> Reading:
    """Return how the answer to a chat is read."""
    if asked.tool_choice == "none":
        return Reading()
    schemas = {tool.function.name: tool.function.parameters for tool in asked.tools}
    return Reading(schemas, is_forced=asked.tool_choice != "auto")


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
    given = {name: params[name] for name in IN_PARAMS if params.get(name) is not None}
    if "messages" in body and "logprobs" in given:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    return {"background": True} | body | given


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
    asked: AskedOfModel,
    body: JsonObject,
    question: dict[str, object],
    called: Mapping[str, str] = CALLED,
) -> Job:
    """Return the job that asks a question. Raises InvalidJob.

    called  the caller's names for the job's fields, for `validate`
    """
    fields: dict[str, object] = {
        "job_id": job_id,
        "model": asked.model,
        "tenant": caller.tenant,
        "traceparent": caller.traceparent,
        "priority_class": caller.bounded(_priority_class(asked)),
    }
    if caller.over_limit is not None:
        fields["over_limit"] = caller.over_limit
    fields |= {name: body[name] for name in OPTIONS if name in body}
    if "not_before" in body:
        fields["not_before_ms"] = _unix_ms(body["not_before"])
    return validate(Job, fields | question, called)


def _refuse_streamed_scores(asked: ChatRequest | CompletionRequest) -> None:
    if asked.stream and asked.prompt_logprobs is not None:
        sentence = "they do not come with stream; leave stream out, or ask for echo and logprobs"
        raise InvalidJob(f"prompt_logprobs: {sentence}", "prompt_logprobs")


def _unix_ms(given: JsonValue) -> int:
    """Return a time as unix milliseconds. Raises InvalidJob.

    It is given as unix seconds, or in ISO 8601 with its zone.
    """
    if isinstance(given, str):
        with suppress(ValueError):
            time = datetime.fromisoformat(given)
            if time.tzinfo is not None:
                return int(time.timestamp() * 1000)
    elif isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= LAST_S:
        return int(given * 1000)
    forms = "unix seconds, or a time with its zone such as 2030-01-31T12:00:00Z"
    raise InvalidJob(f"not_before: give {forms}", "not_before")


def _priority_class(asked: AskedOfModel) -> PriorityClass:
    """Return the priority class. A number follows vLLM's rule: lower goes first."""
    if asked.priority:
        return "high" if asked.priority < 0 else "batch"
    return TIERS.get(asked.service_tier, "normal")


def _sampling(asked: Asked, body: JsonObject, forced: JsonObject | None) -> JsonObject:
    sampling = {name: body[name] for name in SAMPLING if name in body}
    structures = _structures(asked, body)
    if forced is not None:
        structures.append({"json": forced})
    if len(structures) > 1:
        sentence = "give one of response_format, structured_outputs, regex, json_schema, a guided_"
        sentence += " field, a forced tool"
        raise InvalidJob(f"response_format: {sentence}", "response_format")
    if structures:
        sampling["structured_outputs"] = structures[0]
    return sampling


def _structures(asked: Asked, body: JsonObject) -> list[JsonValue]:
    """Return all the constraints on the answer's form that the request gives, in any field."""
    structures: list[JsonValue] = []
    wanted = asked.response_format
    if isinstance(wanted, JsonSchemaFormat):
        structures.append({"json": wanted.json_schema.schema_})
    elif wanted is not None and not isinstance(wanted, TextFormat):
        structures.append({"json_object": True})
    own = body.get("structured_outputs")
    if isinstance(own, dict):
        own = {name: own[name] for name in STRUCTURES if own.get(name) is not None}
    if own is not None:
        structures.append(own)
    for name, kind in OF_STRUCTURE.items():
        is_neutral = body.get(name) in NEUTRAL_OF_STRUCTURE.get(name, ())
        if body.get(name) is not None and not is_neutral:
            structures.append({kind: body[name]})
    return structures


def _forced_call(asked: ChatRequest) -> JsonObject | None:
    """Return the JSON schema of the one call that the answer must be; None where none is forced.

    Raises InvalidJob where the forced tool is not among the tools.
    """
    choice, tools = asked.tool_choice, asked.tools
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return None
    if not tools:
        raise InvalidJob("tool_choice: asks for a tool that is not among tools", "tool_choice")
    schema: JsonObject = {"anyOf": [_call_schema(tool) for tool in tools]}
    definitions = [tool.function.parameters.get("$defs") for tool in tools]
    merged = {
        name: item
        for group in definitions
        if isinstance(group, dict)
        for name, item in group.items()
    }
    return schema | ({"$defs": merged} if merged else {})


def _call_schema(tool: Tool) -> JsonObject:
    # References in a tool's schema begin at its root, so its definitions move to the new root.
    arguments = {name: part for name, part in tool.function.parameters.items() if name != "$defs"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _message(message: ChatMessage) -> JsonObject:
    """Return the message as chat templates want it.

    There is one system role; content is text, and arguments are objects.
    """
    shown: JsonObject = message.model_dump(exclude_none=True)
    if message.role == "developer":
        shown["role"] = "system"
    if isinstance(message.content, list):
        shown["content"] = "\n".join(part.text for part in message.content)
    elif message.content is None:
        shown["content"] = ""
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": call.function.parsed()},
            }
            for call in message.tool_calls
        ]
    return shown
