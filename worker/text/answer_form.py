"""The form of a chat's answer: how it marks what it thinks and calls, and to what it is held."""

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from pydantic import JsonValue

from penstock.schemas.api.closed_schema import closed_arguments
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat
from penstock.schemas.markup.form import CallTags, Format, Tool
from penstock.schemas.markup.forms import FORCED_FORM, Markup
from penstock.schemas.params.sampling import MAX_CONSTRAINT_BYTES, SamplingParams, StructuredOutputs

TAGS = "structured_outputs.structural_tag"  # among what an engine does not obey


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
    form, structure = None, params.structured_outputs
    if structure is not None:
        markup, form = msgspec.structs.replace(markup, calls=None), _as_format(structure)
    elif tools := _callable_tools(chat):
        is_forced, is_parallel = chat.tool_choice == "required", chat.parallel_tool_calls
        is_single = is_parallel is not True if is_forced else is_parallel is False
        tags = CallTags(tools, is_forced, is_single, has_mark)
        form = markup.call_form.held(tags) if holds_tags else None
        if form is None and is_forced:
            markup = msgspec.structs.replace(markup, calls=FORCED_FORM)
            form = markup.call_form.held(tags)
        if form is not None:
            structure = _structure(form, "tools", is_needed=is_forced)
    thinking, budget = markup.thinking if holds_tags else None, params.thinking_token_budget
    if thinking is None or not has_mark(thinking.marks[1]):
        refuse_budget(params)
    elif budget is None:
        budget = chat.thinking_budget
    if thinking and ((structure and form) or budget is not None):
        rest = form if structure else None
        form = thinking.held_before(rest, markup.call_form, markup.is_open, budget)
        structure = _structure(form, structure.asked_as if structure else None, is_needed=True)
    elif structure is not None and markup.thinking:
        markup = msgspec.structs.replace(markup, reasoning=None, is_open=False)
    # With tools it is said even of an answer that can call none: its text is not to be searched.
    return AnswerForm(None if markup == Markup() and not chat.tools else markup, structure)


def refuse_budget(params: SamplingParams) -> None:
    """Raise InvalidJob if there is a budget for thinking that nothing can end."""
    if params.thinking_token_budget is not None:
        sentence = "only thinking that a model's chat template shows, in chats, can be ended"
        raise InvalidJob(f"thinking_token_budget: {sentence}", "thinking_token_budget")


def _callable_tools(chat: Chat) -> list[Tool]:
    tools = []
    for tool in chat.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            continue  # a tool of another form, which the model's template may know
        schema = function.get("parameters")
        if not chat.callable_tools or name in chat.callable_tools:
            schema = schema if isinstance(schema, dict) else {}
            form: Format = {"type": "json_schema", "json_schema": closed_arguments(schema)}
            if function.get("strict") is not True:
                form["lenient"] = True  # it is held as far as it can
            tools.append(Tool(name, schema, form))
    return tools


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
