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
_THEIRS: dict[str, tuple[JsonValue, ...]] = {
    "conversation": ("",),
    "prompt": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "max_tool_calls": (),
    "context_management": ([],),
}
_OF_THEM = {"user", "safety_identifier", "prompt_cache_retention"}
_INCLUDED = {"message.output_text.logprobs", "reasoning.encrypted_content"}
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
    asked = validate(ResponsesRequest, body)
    if asked.background and not asked.store:
        raise InvalidJob("store: what runs in the background is stored; leave it out", "store")
    if unknown := [each for each in asked.include if each not in _INCLUDED]:
        raise InvalidJob(f"include: {unknown[0]} is not here; leave it out", "include")
    form = chat_form(caller, _chat(asked, body), job_id)
    assert form.job.chat is not None
    said = form.job.chat.messages
    place = 1 if asked.instructions else 0
    chat = form.job.chat.model_copy(update={"messages": [*said[:place], *before, *said[place:]]})
    if len(chat.messages) > MAX_MESSAGES:
        sentence = f"the conversation has {len(chat.messages)} messages, at most {MAX_MESSAGES}"
        raise InvalidJob(f"previous_response_id: {sentence}", "previous_response_id")
    repeated = _repeated(asked, body)
    if conversation_id:
        repeated["conversation"] = {"id": conversation_id}
    own = {"chat": chat, "repeated": repeated, "background": asked.background}
    return replace(
        form,
        job=with_form_of(form.job.model_copy(update=own), "text.format"),
        namespaces=namespaces(asked.tools),
        is_kept=asked.store,
        ignored=_ignored(asked, body),
    )


def conversation_id_of(body: JsonObject) -> str:
    """Take the conversation out of a request's body; return its id, or "". Raises InvalidJob."""
    given = body.pop("conversation", "")
    name = given.get("id") if isinstance(given, dict) else given
    if not isinstance(name, str):
        raise InvalidJob("conversation: give its id", "conversation")
    if name and body.get("previous_response_id"):
        sentence = "previous_response_id goes on with something else; give one of them"
        raise InvalidJob(f"conversation: {sentence}", "conversation")
    if name and body.get("store") is False:
        raise InvalidJob("store: a conversation keeps what is said; leave it out", "store")
    return name


def asked_items(body: JsonObject) -> list[JsonObject]:
    """Return what a request for a response asks, as items. Raises InvalidJob."""
    given = validate(ResponsesRequest, body).input
    if isinstance(given, str):
        text: JsonObject = {"type": "input_text", "text": given}
        return [{"type": "message", "role": "user", "content": [text]}]
    return [shown_item(item) for item in given]


def shown_item(item: Item) -> JsonObject:
    """Return an item as OpenAI shows it."""
    shown: JsonObject = item.model_dump(exclude_none=True)
    content = shown.get("content")
    if isinstance(content, str) and isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
        shown["content"] = list[JsonValue](content)
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") == "output_text":
            part |= {"annotations": [], "logprobs": []}
    return shown


def input_tokens_form(caller: Caller, body: JsonObject, job_id: str = "") -> TextContext:
    """Read a request for the number of a prompt's tokens. Raises InvalidJob."""
    refuse_unless({"previous_response_id": ("",)}, body, {})
    asked = validate(ResponsesRequest, body)
    form = tokenize_form(caller, _chat(asked, body), job_id)
    return replace(form, ignored=_ignored(asked, body))


def _chat(asked: ResponsesRequest, body: JsonObject) -> JsonObject:
    """Return the body of a chat that asks for the same."""
    own: JsonObject = {
        "messages": list[JsonValue](_messages(asked)),
        "stream": asked.stream,
        "metadata": dict[str, JsonValue](asked.metadata),
    }
    if asked.tools:
        own |= chat_tools(asked)
    if asked.max_output_tokens is not None:
        own["max_completion_tokens"] = asked.max_output_tokens
    if asked.reasoning.effort is not None:
        own["reasoning_effort"] = asked.reasoning.effort
    if asked.text.verbosity is not None:
        own["chat_template_kwargs"] = {"verbosity": asked.text.verbosity}
    if asked.truncation == "auto":
        own["truncate_prompt_tokens"] = _WHOLE_PROMPT
    if asked.top_logprobs or "message.output_text.logprobs" in asked.include:
        own |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.text.format.type != "text":
        own["response_format"] = _form(asked)
    return as_chat(asked, body, own, _THEIRS)


def _form(asked: ResponsesRequest) -> JsonValue:
    form = asked.text.format
    if form.type == "json_object":
        return {"type": "json_object", "schema": form.schema_}
    if form.schema_ is None:
        raise InvalidJob("text.format.schema: give the schema", "text")
    named: JsonObject = {"name": form.name or "output", "schema": form.schema_}
    if form.strict is not None:
        named["strict"] = form.strict
    return {"type": "json_schema", "json_schema": named}


def _messages(asked: ResponsesRequest) -> Iterator[JsonObject]:
    if asked.instructions:
        yield {"role": "system", "content": asked.instructions}
    if isinstance(asked.input, str):
        yield {"role": "user", "content": asked.input}
    else:
        yield from turns(asked.input)


def turns(items: Iterable[Item]) -> Iterator[JsonObject]:
    """Yield the messages of a chat that items are."""
    said: JsonObject = {}  # what the assistant said, thought and called, in several items
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            if said:
                yield said
                said = {}
            yield {"role": item.role, "content": _content(item.content)}
        elif isinstance(item, CallOutputItem):
            if said:
                yield said
                said = {}
            content = _content(item.output)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        elif said and not _goes_with(item, said):
            yield said
            said = _added({}, item)
        else:
            said = _added(said, item)
    if said:
        yield said


def _goes_with(item: Item, said: JsonObject) -> bool:
    """Return whether an item is a part of the same turn: thinking, then text, then calls."""
    if isinstance(item, ReasoningItem):
        return said.keys() == {"role", "reasoning_content"}
    return not isinstance(item, MessageItem) or not {"content", "tool_calls"} & said.keys()


def _added(said: JsonObject, item: Item) -> JsonObject:
    """Return the assistant's message with one item more."""
    said = {"role": "assistant", **said}
    if isinstance(item, MessageItem):
        said["content"] = _content(item.content)
    elif isinstance(item, ReasoningItem):
        thought = "\n".join(part.text for part in (item.content or item.summary))
        before = said.get("reasoning_content")
        said["reasoning_content"] = f"{before}\n{thought}" if before else thought
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        calls = said.get("tool_calls")
        said["tool_calls"] = [*(calls if isinstance(calls, list) else []), _past_call(item)]
    return said


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


def _repeated(asked: ResponsesRequest, body: JsonObject) -> JsonObject:
    """Return what a response repeats of its request."""
    return {
        "background": asked.background,
        "conversation": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": dict[str, JsonValue](asked.metadata),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
        "store": asked.store,
        "temperature": body.get("temperature"),
        "text": {
            "format": asked.text.format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": asked.text.verbosity or "medium",
        },
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": shown_tools(asked.tools),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": body.get("top_p"),
        "truncation": asked.truncation,
        "user": body.get("user"),
    }


def _ignored(asked: ResponsesRequest, body: JsonObject) -> list[str]:
    return ignored_beside(asked, body, _THEIRS.keys() | _OF_THEM, "input")
