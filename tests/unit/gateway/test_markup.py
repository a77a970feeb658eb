"""What a model thinks, calls and says is found in its text, in each form that models write."""

import json
import re

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from marked_texts import MARKUPS, TEXTS, TOOLS, WRITTEN, pieces_of, read, written
from penstock.gateway.markup.reader import Reading
from penstock.schemas.markup.forms import CALL_FORMS, FORCED_FORM, Markup
from penstock.schemas.markup.source import Found
from penstock.schemas.markup.tagged_values import TaggedValues

TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
ARGUMENTS = st.fixed_dictionaries(
    {"text": st.text(max_size=12), "n": st.integers(-9, 9)},
    optional={"deep": st.just({"a": [1, {"b": '}"]</tool_call>'}]})},
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3)


def test_each_form_of_the_table_has_its_texts() -> None:
    assert WRITTEN.keys() == CALL_FORMS.keys() - {FORCED_FORM}


def test_a_form_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="nobody"):
        msgspec.convert({"calls": "nobody"}, Markup)


@pytest.mark.parametrize("kind", WRITTEN)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_calls_are_read_as_they_are_written(
    kind: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int]
) -> None:
    if isinstance(
        CALL_FORMS[kind], TaggedValues
    ):  # its values are no JSON strings: nothing in them can be escaped
        calls = [("f", {"text": text, "n": 5}) for text in ("12", "two\nlines", "")]
    # The end of a message is a token of its own, and as text it is written alike.
    assume(kind != "openai" or not any("<|" in f"{args['text']}" for _, args in calls))
    text = written(kind, calls)
    found = read(pieces_of(text, cuts), Markup(kind))
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == calls
    assert not found.content.strip() and not found.reasoning


@given(TEXTS, st.lists(st.integers(0, 400), max_size=14), MARKUPS, st.booleans())
def test_nothing_depends_on_where_the_text_was_cut(
    text: str, cuts: list[int], markup: Markup, is_forced: bool
) -> None:
    reading = Reading(TOOLS, is_forced=is_forced)
    assert read(pieces_of(text, cuts), markup, reading) == read([text], markup, reading)


@given(TEXTS)
def test_text_that_is_no_call_is_shown(text: str) -> None:
    found = read(list(text), Markup("hermes"))
    if "<tool_call>" not in text:
        assert (found.content, found.calls) == (text, [])
    tagged = [inner for inner in TAGGED.findall(text) if '"name":"f"' in inner[:12]]
    assert len(found.calls) >= len(tagged)


@given(st.text(st.sampled_from("ab <>\n"), max_size=40))
def test_what_cannot_begin_a_mark_is_shown_at_once(text: str) -> None:
    reader = Reading(TOOLS).reader(Markup("hermes"))
    assert reader.feed(text + "end").content == text + "end"


def test_arguments_are_shown_before_the_call_has_ended() -> None:
    reader = Reading(TOOLS).reader(Markup("hermes"))
    reader.feed('<tool_call>{"name": "f", "arguments": {"te')
    (piece,) = reader.feed('xt": "long').calls
    assert (piece.name, piece.arguments) == (None, 'xt": "long')


CASES: list[tuple[str, Markup, str, str, list[tuple[str, str]]]] = [
    ("<think>\nhm\n</think>\n\nHi", Markup(reasoning="qwen3"), "Hi", "hm", []),
    ("hm</think>Hi", Markup(reasoning="qwen3", is_open=True), "Hi", "hm", []),
    ("<think>hm</think>Hi", Markup(reasoning="qwen3", is_open=True), "Hi", "hm", []),
    ("Hi <think>", Markup(reasoning="qwen3"), "Hi <think>", "", []),
    ("[THINK]hm[/THINK]Hi", Markup(reasoning="mistral"), "Hi", "hm", []),
    ("never ends", Markup(reasoning="deepseek_r1", is_open=True), "", "never ends", []),
    (
        'hm <tool_call>{"name":"f","arguments":{}}</tool_call>',
        Markup("hermes", "qwen3", is_open=True), "", "hm", [("f", "{}")],
    ),
    (
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two"
        "<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        Markup("openai", "openai_gptoss"), "Hi", "one\ntwo", [],
    ),
    ('{"name": "Ada", "age": 36}', Markup("llama3_json"), '{"name": "Ada", "age": 36}', "", []),
    ('{"name": "f"', Markup("llama3_json"), '{"name": "f"', "", []),
    ('<|python_tag|>{"name": "f", "parameters": {}}', Markup("llama3_json"), "", "", [("f", "{}")]),
    ('[TOOL_CALLS][{"name":"f","arguments":{"n":1}}]', Markup("mistral"), "", "",
     [("f", '{"n":1}')]),
    ("[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", Markup("mistral"), "", "", [("f", "{}")]),
    ("[1, 2]", Markup("pythonic"), "[1, 2]", "", []),
    ("[f(" + "(" * 5000, Markup("pythonic"), "[f(" + "(" * 5000, "", []),
    ('a <tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call> b', Markup("hermes"),
     "a b", "", [("f", '{"n": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', Markup("hermes"),
     "", "", [("f", '{"n": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1', Markup("hermes"), "", "",
     [("f", '{"n": 1')]),
    ("<tool_call>\n<function=f\n</function>\n</tool_call>", Markup("qwen3_xml"),
     "<function=f\n</function>\n</tool_call>", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "markup", "content", "reasoning", "calls"), CASES)
def test_cases(
    text: str, markup: Markup, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, markup)
        told = [(each.name, each.arguments) for each in found.calls]
        assert (found.content, found.reasoning, told) == (content, reasoning, calls)


@pytest.mark.parametrize(
    "form", ['{"name":"f","arguments":{"n":1}}', '[{"name":"f","arguments":{"n":1}}]']
)
def test_a_forced_call_needs_no_mark(form: str) -> None:
    found = read(list(form), None, Reading(TOOLS, is_forced=True))
    assert [(each.name, each.arguments) for each in found.calls] == [("f", '{"n":1}')]
    assert not found.content


def test_without_tools_and_thinking_all_is_content() -> None:
    text = ' <tool_call>{"name":"f","arguments":{}}</tool_call> <think> '
    assert read([text], Markup(), Reading()) == Found(text)
    assert read([text], None, Reading()) == Found(text)


def test_a_long_call_costs_no_more_than_its_length() -> None:
    """Half a million characters, in pieces of four, would take minutes if each piece read all."""
    text = (
        '<tool_call>{"name": "f", "arguments": {"text": "' + "ab\\n " * 100_000 + '"}}</tool_call>'
    )
    (call,) = read([text[at : at + 4] for at in range(0, len(text), 4)], Markup("hermes")).calls
    assert len(json.loads(call.arguments)["text"]) == 400_000
