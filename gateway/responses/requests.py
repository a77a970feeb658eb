"""Requests for a response, read as chats."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.openai.forms import chat_form
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.texts import TextContext, tokenize_form
from penstock.gateway.openai.translated import as_chat, ignored_beside, with_form_of
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.openai.validation import validate
from penstock.gateway.responses.tools import chat_tools, joined, namespaces, shown_tools
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.api.responses import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesRequest,
)
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import MAX_MESSAGES, Message

# What asks for what is not here, or for work of OpenAI's own servers.
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "conversation": ("",),
    "prompt": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "max_tool_calls": (),
    "context_management": ([],),
}
_WITHOUT_EFFECT = {"user", "safety_identifier", "prompt_cache_retention"}
_INCLUDABLE = {"message.output_text.logprobs", "reasoning.encrypted_content"}
_WHOLE_PROMPT = -1  # as much of it as there is room for


def responses_form(
    caller: Caller,
    body: JsonObject,
    job_id: str = "",
    before: Sequence[Message] = (),
    conversation_id: str = "",
) -> AnswerContext:
    """Read a request for a response. Raises InvalidJob.

    before           the messages of the conversation that goes on
    conversation_id  a conversation that the caller looks after; the body names none
    """
    request = validate(ResponsesRequest, body)
    if request.background and not request.store:
        raise InvalidJob("store: what runs in the background is stored; leave it out", "store")
    if unknown_names := [name for name in request.include if name not in _INCLUDABLE]:
        raise InvalidJob(f"include: {unknown_names[0]} is not here; leave it out", "include")
    form = chat_form(caller, _chat(request, body), job_id)
    assert form.job.chat is not None
    messages = form.job.chat.messages
    place = 1 if request.instructions else 0
    chat = form.job.chat.model_copy(
        update={"messages": [*messages[:place], *before, *messages[place:]]}
    )
    if len(chat.messages) > MAX_MESSAGES:
        sentence = f"the conversation has {len(chat.messages)} messages, at most {MAX_MESSAGES}"
        raise InvalidJob(f"previous_response_id: {sentence}", "previous_response_id")
    fields = _repeated(request, body)
    if conversation_id:
        fields["conversation"] = {"id": conversation_id}
    own = {"chat": chat, "repeated": fields, "background": request.background}
    return replace(
        form,
        job=with_form_of(form.job.model_copy(update=own), "text.format"),
        namespaces=namespaces(request.tools),
        is_kept=request.store,
        ignored_names=_ignored(request, body),
    )


def conversation_id_of(body: JsonObject) -> str:
    """Take the conversation out of a request's body; return its id, or "". Raises InvalidJob."""
    value = body.pop("conversation", "")
    name = value.get("id") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise InvalidJob("conversation: give its id", "conversation")
    if name and body.get("previous_response_id"):
        sentence = "previous_response_id goes on with something else; give one of them"
        raise InvalidJob(f"conversation: {sentence}", "conversation")
    if name and body.get("store") is False:
        raise InvalidJob("store: a conversation keeps what is said; leave it out", "store")
    return name


def request_items(body: JsonObject) -> list[JsonObject]:
    """Return what a request for a response asks, as items. Raises InvalidJob."""
    value = validate(ResponsesRequest, body).input
    if isinstance(value, str):
        text: JsonObject = {"type": "input_text", "text": value}
        return [{"type": "message", "role": "user", "content": [text]}]
    return [shown_item(item) for item in value]


def shown_item(item: Item) -> JsonObject:
    """Return an item as OpenAI shows it."""
    shape: JsonObject = item.model_dump(exclude_none=True)
    content = shape.get("content")
    if isinstance(content, str) and isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
        shape["content"] = list[JsonValue](content)
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") == "output_text":
            part |= {"annotations": [], "logprobs": []}
    return shape


def input_tokens_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a request for the number of a prompt's tokens. Raises InvalidJob."""
    refuse_unless({"previous_response_id": ("",)}, body, {})
    request = validate(ResponsesRequest, body)
    form = tokenize_form(caller, _chat(request, body), job_id)
    return replace(form, ignored_names=_ignored(request, body))


def _chat(request: ResponsesRequest, body: JsonObject) -> JsonObject:
    """Return the body of a chat that asks for the same."""
    own: JsonObject = {
        "messages": list[JsonValue](_messages(request)),
        "stream": request.stream,
        "metadata": dict[str, JsonValue](request.metadata),
    }
    if request.tools:
        own |= chat_tools(request)
    if request.max_output_tokens is not None:
        own["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning.effort is not None:
        own["reasoning_effort"] = request.reasoning.effort
    if request.text.verbosity is not None:
        own["chat_template_kwargs"] = {"verbosity": request.text.verbosity}
    if request.truncation == "auto":
        own["truncate_prompt_tokens"] = _WHOLE_PROMPT
    if request.top_logprobs or "message.output_text.logprobs" in request.include:
        own |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.text.format.type != "text":
        own["response_format"] = _form(request)
    return as_chat(request, body, own, _NEUTRAL)


def _form(request: ResponsesRequest) -> JsonValue:
    form = request.text.format
    if form.type == "json_object":
        return {"type": "json_object", "schema": form.schema_}
    if form.schema_ is None:
        raise InvalidJob("text.format.schema: give the schema", "text")
    json_schema: JsonObject = {"name": form.name or "output", "schema": form.schema_}
    if form.strict is not None:
        json_schema["strict"] = form.strict
    return {"type": "json_schema", "json_schema": json_schema}


def _messages(request: ResponsesRequest) -> Iterator[JsonObject]:
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
    else:
        yield from turns(request.input)


def turns(items: Iterable[Item]) -> Iterator[JsonObject]:
    """Yield the messages of a chat that items are."""
    turn: JsonObject = {}  # what the assistant said, thought and called, in several items
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            if turn:
                yield turn
                turn = {}
            yield {"role": item.role, "content": _content(item.content)}
        elif isinstance(item, CallOutputItem):
            if turn:
                yield turn
                turn = {}
            content = _content(item.output)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif turn and not _goes_with(item, turn):
            yield turn
            turn = _with_item({}, item)
        else:
            turn = _with_item(turn, item)
    if turn:
        yield turn


def _goes_with(item: Item, turn: JsonObject) -> bool:
    """Return whether an item is a part of the same turn: thinking, then text, then calls."""
    if isinstance(item, ReasoningItem):
        return turn.keys() == {"role", "reasoning_content"}
    return not isinstance(item, MessageItem) or not {"content", "tool_calls"} & turn.keys()


def _with_item(turn: JsonObject, item: Item) -> JsonObject:
    """Return the assistant's message with one item more."""
    turn = {"role": "assistant", **turn}
    if isinstance(item, MessageItem):
        turn["content"] = _content(item.content)
    elif isinstance(item, ReasoningItem):
        thought = "\n".join(part.text for part in (item.content or item.summary))
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{before}\n{thought}" if before else thought
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        calls = turn.get("tool_calls")
        turn["tool_calls"] = [*(calls if isinstance(calls, list) else []), _past_call(item)]
    return turn


def _past_call(item: FunctionCallItem | CustomCallItem) -> JsonValue:
    name = joined(item.namespace, item.name)
    if isinstance(item, CustomCallItem):
        custom: JsonObject = {"name": name, "input": item.input}
        return {"id": item.call_id, "type": "custom", "custom": custom}
    function: JsonObject = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _content(content: str | Sequence[Part]) -> JsonValue:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _repeated(request: ResponsesRequest, body: JsonObject) -> JsonObject:
    """Return what a response repeats of its request."""
    return {
        "background": request.background,
        "conversation": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": dict[str, JsonValue](request.metadata),
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
        "store": request.store,
        "temperature": body.get("temperature"),
        "text": {
            "format": request.text.format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": request.text.verbosity or "medium",
        },
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": shown_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": body.get("top_p"),
        "truncation": request.truncation,
        "user": body.get("user"),
    }


def _ignored(request: ResponsesRequest, body: JsonObject) -> list[str]:
    return ignored_beside(request, body, _NEUTRAL.keys() | _WITHOUT_EFFECT, "input")
