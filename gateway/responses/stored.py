"""Responses that were stored: their jobs and results, shown again."""

from collections.abc import Iterator

from pydantic import JsonValue, TypeAdapter

from penstock.gateway.markup.reader import Reading
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.to_job import job_message
from penstock.gateway.responses.answers import (
    PREFIX,
    failed_answer,
    response_answer,
    running_answer,
)
from penstock.gateway.responses.items import named_apart
from penstock.gateway.responses.requests import turns
from penstock.gateway.responses.tools import custom_names, namespaces
from penstock.schemas.api.openai import ChatMessage, JsonObject, StreamOptions
from penstock.schemas.api.responses import Item, ResponseTool
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import InvalidJob, JobNotFound
from penstock.schemas.event import Result
from penstock.schemas.job import Job, Message

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_TOOLS: TypeAdapter[list[ResponseTool]] = TypeAdapter(list[ResponseTool])


def job_id_of(response_id: str, param: str = "response_id") -> str:
    """Return the id of a response's job. Raises InvalidJob for what is no response's id."""
    if not response_id.startswith(f"{PREFIX}job_"):
        raise InvalidJob(f"{param}: {response_id[:60]!r} is no response's id", param)
    return response_id.removeprefix(PREFIX)


def form_of(job: Job, created_ms: int) -> AnswerContext:
    """Return how a stored job's answer looks. Raises JobNotFound for a job that is no response."""
    chat = job.chat
    if chat is None or "background" not in job.repeated:
        raise JobNotFound(job.job_id)
    tools = [tool["function"] for tool in chat.tools]
    schemas: dict[str, JsonObject] = {}
    for tool in tools:
        if isinstance(tool, dict) and isinstance(parameters := tool.get("parameters"), dict):
            schemas[str(tool["name"])] = parameters
    request_tools = _TOOLS.validate_python(job.repeated.get("tools"))
    return AnswerContext(
        job,
        StreamOptions(),
        Reading(schemas, custom_names(request_tools), chat.tool_choice == "required"),
        is_kept=True,
        namespaces=namespaces(request_tools),
        created_s=created_ms // 1000,
    )


def shown(form: AnswerContext, status: JobStatus, result: Result | None) -> JsonObject:
    """Return a response as it is now. Its result is there once the job has ended."""
    if result is None:
        return running_answer(form, "queued" if status.started_ms is None else "in_progress")
    if result.error is None:
        return response_answer(form, result)
    return failed_answer(form, result)


def conversation(form: AnswerContext, result: Result | None) -> list[Message]:
    """Return the messages up to a response's end, without its instructions. Raises InvalidJob."""
    if result is None or result.error is not None:
        why = "is not there yet" if result is None else "was not made"
        raise InvalidJob(f"previous_response_id: the response {why}", "previous_response_id")
    return going_on(form.job, response_answer(form, result)["output"])


def going_on(job: Job, output: JsonValue) -> list[Message]:
    """Return the messages up to a response's end, whose items are `output`."""
    messages = [ChatMessage.model_validate(turn) for turn in turns(_ITEMS.validate_python(output))]
    return [*_request_messages(job), *map(job_message, messages)]


def input_items(form: AnswerContext) -> list[JsonObject]:
    """Return what a response was asked with, as items, the earlier turns among them."""
    items = [item for message in _request_messages(form.job) for item in _items(form, message)]
    custom_ids = {item["call_id"] for item in items if item["type"] == "custom_tool_call"}
    for item in items:
        if item["type"] == "function_call_output" and item["call_id"] in custom_ids:
            item["type"] = "custom_tool_call_output"
    return [{"id": f"item_{form.job.job_id}_{at}", **item} for at, item in enumerate(items)]


def _request_messages(job: Job) -> list[Message]:
    assert job.chat is not None
    messages = job.chat.messages
    return messages[1:] if job.repeated.get("instructions") else messages


def _items(form: AnswerContext, message: Message) -> Iterator[JsonObject]:
    content = message.get("content")
    if message["role"] == "tool":
        call_id = message.get("tool_call_id")
        yield {"type": "function_call_output", "call_id": call_id, "output": content}
        return
    if thought := message.get("reasoning_content"):
        part: JsonObject = {"type": "reasoning_text", "text": thought}
        yield {"type": "reasoning", "summary": [], "content": [part]}
    if content:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        texts = content if isinstance(content, list) else [{"text": content}]
        parts = [
            {"type": kind, "text": block["text"]} for block in texts if isinstance(block, dict)
        ]
        yield {"type": "message", "role": message["role"], "content": list[JsonValue](parts)}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            yield {"call_id": call.get("id"), **_call(form, call)}


def _call(form: AnswerContext, call: JsonObject) -> JsonObject:
    """Return the call of a message as an item, but for its id."""
    for kind in ("function", "custom"):
        if isinstance(fields := call.get(kind), dict):
            own = {name: value for name, value in fields.items() if name != "name"}
            names = named_apart(form, f"{fields['name']}")
            item = "function_call" if kind == "function" else "custom_tool_call"
            return {"type": item, **names, **own}
    return {}
