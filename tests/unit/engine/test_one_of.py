"""`oneOf` said as `anyOf`: jsonschema finds no value that tells the two apart."""

import copy
import itertools
import random

import pytest
from jsonschema import Draft202012Validator

from penstock.worker.engine.grammar.one_of import Schema, without_one_of

VALUES = [
    *(None, True, False, 0, 1, 1.0, 1.5, "", "a", "b", "abc", [], [1], ["a"], {}),
    *({"k": "a"}, {"k": "b"}, {"k": 1}, {"x": 1}, {"k": "a", "x": 1}, {"k": "b", "x": "a"}),
    *({"k": "a", "y": None}, {"x": 1, "y": None}, {"k": {"k": "a"}}, {"k": {"k": "b"}, "x": 1}),
]
SHARED: Schema = {
    "word": {"type": "string", "maxLength": 3},
    "a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
    "closed": {"type": "object", "properties": {"x": True}, "additionalProperties": False},
    "loop": {"$ref": "#/$defs/loop"},
    "own": {"$id": "http://own", "$defs": {"word": {}, "other": {"$ref": "#/$defs/word"}}},
}
ALTERNATIVES: list[Schema | bool] = [
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": ["null", "boolean"]},
    {"const": "a"}, {"const": 1}, {"const": True}, {"enum": ["a", 1.5, {}]}, {"enum": [0, "b"]},
    {"type": "array", "items": {"type": "string"}}, {"minLength": 2}, True, False, {},
    {"$ref": "#/$defs/word"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/closed"},
    {"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/own/$defs/other"}, {"$ref": "#/$defs/nowhere"},
    {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["x"]}]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["b", 1]}}},
    {"type": "object", "required": ["k"], "properties": {"k": {"$ref": "#/$defs/a"}}},
    {"required": ["k"], "properties": {"k": {"type": "string"}}},
    {"type": "object", "required": ["x"]}, {"type": "object", "required": ["y", "x"]},
    {"required": ["x"]}, {"required": ["k"]}, {"required": ["x", "y"]}, {"required": ["k", "x"]},
    {"type": "object", "properties": {"y": False}},
    {"type": "object", "patternProperties": {"^x": {"type": "string"}}},
]  # fmt: skip
PARENTS: list[Schema] = [{}, {"type": "object"}, {"type": ["object", "string"]}]


def rewritten(schema: Schema) -> Schema | None:
    """The schema in other words; None where it is left as it is."""
    made = copy.deepcopy(schema)
    without_one_of(made, made)
    return None if "oneOf" in made else made


def agree(one: Schema, other: Schema) -> None:
    judges = Draft202012Validator(one), Draft202012Validator(other)
    for value in VALUES:
        first, second = (judge.is_valid(value) for judge in judges)
        assert first == second, (value, one, other)


def test_what_is_said_in_other_words_means_the_same() -> None:
    kept = [each for each in ALTERNATIVES if each != {"$ref": "#/$defs/loop"}]
    kept = [each for each in kept if each != {"$ref": "#/$defs/nowhere"}]
    rng, num_made = random.Random(1), 0
    pairs = [list(each) for each in itertools.product(kept, kept)]
    more = [rng.choices(kept, k=rng.randint(3, 4)) for _ in range(600)]
    for alternatives, parent in itertools.product([*pairs, *more], PARENTS):
        schema: Schema = {**parent, "$defs": SHARED, "oneOf": alternatives}
        made = rewritten(schema)
        if made is not None:
            num_made += 1
            agree(schema, made)
    assert num_made > 700


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"$ref": "#/$defs/word"}, {"type": "array", "items": {"$ref": "#/$defs/word"}}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/closed"}],
        [{"enum": ["a", "b"]}, {"type": "null"}, {"type": "number"}],
        [{"required": ["x"]}, {"required": ["k"]}],
        [{"required": ["x", "y"]}, {"required": ["x", "k"]}],
    ],
)
def test_what_no_two_can_match_is_said_in_other_words(alternatives: list[Schema]) -> None:
    assert rewritten({"$defs": SHARED, "oneOf": alternatives}) is not None


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "string"}, {"minLength": 1}],
        [{"type": "number"}, {"const": 1}],
        [{"$ref": "#/$defs/loop"}, {"type": "string"}],
        [{"$ref": "#/$defs/nowhere"}, {"type": "string"}],
        [{"$ref": "#/$defs/own/$defs/other"}, {"type": "integer"}],
        [{"$ref": "#word"}, {"type": "string"}],
        [{"type": "text"}, {"type": "string"}],
        [{"required": ["x"]}, {"required": ["k", "y"]}],
        [{"type": "integer"}] * 2,
        [{"const": number} for number in range(65)],
    ],
)
def test_what_two_may_match_stays(alternatives: list[Schema]) -> None:
    assert rewritten({"$defs": SHARED, "oneOf": alternatives}) is None
