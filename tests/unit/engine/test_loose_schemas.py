"""Schemas that a grammar can hold only in part: it holds what it can, and the rest is checked."""

import json
from collections.abc import Iterator

import pytest
from pydantic import JsonValue
from tokenizers import Tokenizer

from paths import ROOT, SUPPORT
from penstock.schemas.errors import InvalidJob
from penstock.schemas.params.sampling import StructuredOutputs
from penstock.worker.engine.grammar.constraints import Grammars
from penstock.worker.engine.grammar.sandbox import Sandbox, SandboxLimits

Schema = dict[str, JsonValue]
SCHEMAS: dict[str, Schema] = json.loads((SUPPORT / "forms.json").read_text())
BUNDLED = ROOT / "worker/bundled/penstock-5m"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(BUNDLED, tokenizer.get_vocab_size(), frozenset([0]))
    yield made
    made.close()


LOOSE: dict[str, tuple[Schema, str, str, str]] = {
    "not": ({"type": "string", "not": {"const": "a"}}, '"b"', '"a"', "is not allowed for"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "[2, 1]", "[2]", "None of [2]"),
    "one of": ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, '"a"', '"abcd"', "more than one"),
    "reference": (
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}},
        "", '{"a": 1}', "not checked: Resource 'https://example.com/a.json'",
    ),
    "look-ahead": (
        {"type": "object", "properties": {"default": {"pattern": "^(?!b)..$"}}},
        '{"default": "ab"}', '{"default": "ba"}', '/default: "ba" does not match',
    ),
    "names": (
        {
            "type": "object",
            "patternProperties": {"^(?=a)": {"const": 1}}, "additionalProperties": False,
        },
        '{"a": 1}', '{"b": 1}', "Additional properties",
    ),
    "items": (
        {"items": {"enum": [1, 2]}, "type": "array", "uniqueItems": True},
        "[2, 1]", "[1, 1]", "non-unique",
    ),
    "if": (
        {
            "type": "object", "properties": {"a": {"type": "integer"}},
            "if": {"required": ["a"]}, "then": {"required": ["b"]},
        },
        '{"a": 1, "b": 2}', '{"a": 1}', '"b" is a required property',
    ),
    "dialect": (
        {"$schema": "https://example.com/none", "type": "boolean", "not": {"const": True}},
        "", "true", "not checked: ",
    ),
    "bounds": (
        {
            "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5,
            "not": {"const": 4},
        },
        "5", "4", "is not allowed for",
    ),
}  # fmt: skip


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", LOOSE)
def test_what_is_held_loosely_is_checked_when_it_is_made(
    tokenizer: Tokenizer, grammars: Grammars, name: str
) -> None:
    schema, right, wrong, reason = LOOSE[name]
    outputs = StructuredOutputs(json_schema=schema, lenient=True)
    constraint = grammars.compile(outputs).result().constraint([])
    assert json.loads(constraint.loose_schema) == schema
    for text in filter(None, (right, wrong)):
        constraint = grammars.compile(outputs).result().constraint(tokens(tokenizer, text))
        assert constraint.error is None and constraint.matcher.is_accepting(), text
    if right:
        assert grammars.check(constraint.loose_schema, tokens(tokenizer, right)).result() == ""
    assert reason in grammars.check(constraint.loose_schema, tokens(tokenizer, wrong)).result()
    error = grammars.check(constraint.loose_schema, tokens(tokenizer, wrong[:-1])).result()
    assert "not JSON" in error


def test_what_can_be_held_whole_is_not_checked(grammars: Grammars) -> None:
    for schema in SCHEMAS.values():
        outputs = StructuredOutputs(json_schema=schema, lenient=True)
        loose_schema = grammars.compile(outputs).result().constraint([]).loose_schema
        assert not loose_schema or "uniqueItems" in loose_schema


@pytest.mark.parametrize(
    "schema", [{"enum": []}, {"type": "text"}, {"$ref": "#/$defs/none"}, {"pattern": "a{1001}"}]
)
def test_what_nothing_can_be_is_refused_although_it_need_not_be_held(
    grammars: Grammars, schema: Schema
) -> None:
    with pytest.raises(InvalidJob, match="response_format: ") as refused:
        grammars.compile(
            StructuredOutputs(json_schema=schema, lenient=True, asked_as="response_format")
        ).result()
    assert (refused.value.code, refused.value.param) == ("unsupported_schema", "response_format")


def test_a_check_that_would_take_for_ever_is_given_up(tokenizer: Tokenizer) -> None:
    limits = SandboxLimits(cpu_s=1, memory_bytes=256 << 20)
    sandbox = Sandbox(tokenizer.to_str(), tokenizer.get_vocab_size(), [0], limits)
    shared: Schema = {"n0": {"type": "object"}}
    for number in range(1, 40):
        inner: JsonValue = {"$ref": f"#/$defs/n{number - 1}"}
        either = [{"properties": {"a": inner}, "minProperties": n} for n in (1, 2, 3)]
        shared[f"n{number}"] = {"anyOf": either}
    schema = json.dumps({"$defs": shared, "$ref": "#/$defs/n39", "pattern": "^(?!x)(a|a)*(?=b)$"})
    deep = "{" + '"a": {' * 38 + '"a": 1' + "}" * 39
    assert "not checked: that takes more than 1 s" in sandbox.schema_error(schema, deep)
    assert "backtracking" in sandbox.schema_error(schema, json.dumps("a" * 60 + "c"))
    assert "too deep" in sandbox.schema_error('{"type": "null"}', "[" * 100_000)
    assert sandbox.schema_error('{"type": "null"}', "null") == ""
    sandbox.close()
