"""The form of a chat's answer: how it marks what it thinks and calls, and to what it is held."""

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from pydantic import JsonValue

from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat
from penstock.schemas.params.sampling import MAX_CONSTRAINT_BYTES, SamplingParams, StructuredOutputs
from penstock.schemas.wire.markup import MARKS, THINKING, Markup
from penstock.worker.text.call_tags import CallableTool, CallTags, Format

TAGS = "structured_outputs.structural_tag"  # among what an engine does not obey
_BETWEEN = r"[ \n]{0,4}"  # thinking and what has a form


class AnswerForm(NamedTuple):
    markup: Markup | None = None
    structure: StructuredOutputs | None = None


def answer_form(
    chat: Chat,
    params: SamplingParams,
    markup: Markup | None,
    holds_tags: bool,
    has_mark: Callable[[str], bool],
) -> AnswerForm:
    """Return the form of the answer to a chat. Raises InvalidJob.

    markup      the marks of its model, where it thinks or may call tools
    holds_tags  the engine obeys structural tags
    has_mark    returns whether the tokenizer has a mark as one token
    """
    markup = markup or Markup()
    form, given = None, params.structured_outputs
    if given is not None:
        markup, form = msgspec.structs.replace(markup, calls=None), _as_format(given)
    elif tools := _callable_tools(chat):
        tags = _call_tags(chat, tools, has_mark)
        form = tags.format(markup.calls) if holds_tags else None
        if form is not None:
            given = _structure(form, "tools", is_needed=tags.is_forced)
        elif tags.is_forced:
            markup = msgspec.structs.replace(markup, calls="json")
            lenient = not any(tool.is_strict for tool in tools)
            form = {"type": "json_schema", "json_schema": tags.as_json(), "lenient": lenient}
            given = _structure(form, "tools", is_needed=True)
    thinks, budget = holds_tags and markup.reasoning in THINKING, params.thinking_token_budget
    if not (thinks and has_mark(THINKING[markup.reasoning or ""][1])):
        refuse_budget(params)
    elif budget is None:
        budget = chat.thinking_budget
    if thinks and ((given and form) or budget is not None):
        form = _after_thinking(markup, form if given else None, budget)
        given = _structure(form, given.asked_as if given else None, is_needed=True)
    elif given is not None and markup.reasoning in THINKING:
        markup = msgspec.structs.replace(markup, reasoning=None, is_open=False)
    # With tools it is said even of an answer that can call none: its text is not to be searched.
    return AnswerForm(None if markup == Markup() and not chat.tools else markup, given)


def refuse_budget(params: SamplingParams) -> None:
    """Raise InvalidJob if there is a budget for thinking that nothing can end."""
    if params.thinking_token_budget is not None:
        sentence = "only thinking that a model's chat template shows, in chats, can be ended"
        raise InvalidJob(f"thinking_token_budget: {sentence}", "thinking_token_budget")


def _callable_tools(chat: Chat) -> list[CallableTool]:
    tools = []
    for tool in chat.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            continue  # a tool of another form, which the model's template may know
        schema = function.get("parameters")
        if not chat.callable_tools or name in chat.callable_tools:
            schema = schema if isinstance(schema, dict) else {}
            tools.append(CallableTool(name, schema, function.get("strict") is True))
    return tools


def _call_tags(chat: Chat, tools: list[CallableTool], has_mark: Callable[[str], bool]) -> CallTags:
    is_forced = chat.tool_choice == "required"
    several = chat.parallel_tool_calls
    is_single = several is not True if is_forced else several is False
    return CallTags(tools, is_forced, is_single, has_mark)


def _as_format(structure: StructuredOutputs) -> Format | None:
    """Return the constraint as a part of a structural tag; None where it cannot be one."""
    kind, text = structure.constraint
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    if kind == "grammar":
        return None
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the engine says what is wrong with it
    if kind == "json":
        return {"type": "json_schema", "json_schema": value, "lenient": structure.lenient}
    if kind == "choice" and isinstance(value, list):
        return {"type": "or", "elements": [{"type": "const_string", "value": e} for e in value]}
    inner = value.get("format", value) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else None


def _after_thinking(markup: Markup, form: Format | None, budget: int | None) -> Format:
    """Return a format in which thinking comes first, which has an end and perhaps a budget."""
    begin, end = THINKING[markup.reasoning or ""]
    thought: Format = {"type": "any_text"}
    if calls := MARKS[markup.calls or ""]:
        thought["excludes"] = [calls[0]]  # it would be read as a call, and is not held there
    if budget is not None:
        thought["max_tokens"] = budget
    begun = "" if markup.is_open else begin
    first: Format = {"type": "tag", "begin": begun, "content": thought, "end": end}
    if form is not None:
        between: Format = {"type": "regex", "pattern": _BETWEEN}
        first = {"type": "sequence", "elements": [first, between]}
    if not markup.is_open:
        first = {"type": "optional", "content": first}
    return {"type": "sequence", "elements": [first, form or {"type": "any_text"}]}


def _structure(form: Format, asked_as: str | None, is_needed: bool) -> StructuredOutputs | None:
    """Return the constraint; None where it is too large and the job does not need it.

    Raises InvalidJob where it does.
    """
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    if len(text.encode(errors="surrogatepass")) > MAX_CONSTRAINT_BYTES:
        if not is_needed:
            return None
        sentence = f"the schemas of what the answer must be are above {MAX_CONSTRAINT_BYTES} bytes"
        raise InvalidJob(f"tools: {sentence}; give fewer or smaller ones", "tools")
    if form["type"] == "json_schema":
        schema = form["json_schema"]
        schema = schema if isinstance(schema, dict) else {}
        lenient = form.get("lenient") is True
        return StructuredOutputs(json_schema=schema, lenient=lenient, asked_as=asked_as)
    return StructuredOutputs(structural_tag=text, asked_as=asked_as)
