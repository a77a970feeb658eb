"""Messages in every form that callers send are made what chat templates read."""

import pytest
from pydantic import JsonValue

from penstock.schemas.job import Message
from penstock.worker.text.messages import plain_messages


def called(arguments: JsonValue, **more: JsonValue) -> Message:
    call: JsonValue = {"type": "function", "id": "1", **of_function(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def of_function(arguments: JsonValue, name: str = "f") -> Message:
    return {"function": {"name": name, "arguments": arguments}}


FORMS: dict[str, tuple[Message, Message]] = {
    "parts": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "a\nb"},
    ),
    "strings as parts": ({"role": "user", "content": ["a"]}, {"role": "user", "content": "a"}),
    "no parts": ({"role": "user", "content": []}, {"role": "user", "content": ""}),
    "null": (called({"x": 1}, content=None, refusal=None, function_call=None), called({"x": 1})),
    "absent": ({k: v for k, v in called({}).items() if k != "content"}, called({})),
    "arguments as a text": (called('{"x": 1}'), called({"x": 1})),
    "no arguments": (called(""), called({})),
    "null arguments": (called(None), called({})),
    "arguments cut off": (called('{"x'), called({"unparsed_arguments": '{"x'})),
    "arguments that are a list": (called("[1]"), called({"unparsed_arguments": "[1]"})),
    "nested too deep": (called("[" * 999), called({"unparsed_arguments": "[" * 999})),
    "a call without an id": (
        called({}, tool_calls=[{"id": None, **of_function({})}]),
        called({}, tool_calls=[{"type": "function", **of_function({})}]),
    ),
    "a custom tool": (
        called({}, tool_calls=[{"type": "custom", "custom": {"name": "f", "input": "x"}}]),
        called({}, tool_calls=[{"type": "function", **of_function({"input": "x"})}]),
    ),
    "the older form": (
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        called({}, tool_calls=[{"type": "function", "id": "f", **of_function({"x": 1})}]),
    ),
    "the older result": (
        {"role": "function", "name": "f", "content": "1"},
        {"role": "tool", "name": "f", "tool_call_id": "f", "content": "1"},
    ),
    "the newer system": (
        {"role": "developer", "content": "Be kind."},
        {"role": "system", "content": "Be kind."},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_message_is_made_plain(form):
    given, plain = FORMS[form]
    assert plain_messages([given]) == [plain] == plain_messages([plain])
    in_parts = [{"type": "text", "text": plain["content"]}]
    if form != "parts":
        assert plain_messages([given], in_parts=True) == [plain | {"content": in_parts}]
