"""Schemas as common libraries emit them compile, and what is generated is what they say."""

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import itertools
import json
import pathlib
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher, LLTokenizer
from pydantic import (
    AnyUrl,
    Base64Bytes,
    BaseModel,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    PositiveInt,
    PostgresDsn,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from penstock.worker.engine.grammar.json_schema import respelled
from penstock.worker.engine.grammar.structured import LIMITS, grammar_of

WALKS = 8
TOKENIZER = LLTokenizer("byte")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Pair(NamedTuple):
    a: int
    b: bool


@dataclasses.dataclass
class Point:
    x: float
    tags: set[Literal["a", "b"]] = dataclasses.field(default_factory=set)


class Everything(BaseModel):
    path: pathlib.Path
    secret: SecretStr
    raw: bytes
    numbers: set[int]
    price: decimal.Decimal
    when: datetime.datetime | None
    colour: Colour
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pairs: list[Pair] = Field(default_factory=list, max_length=3)
    point: Point


TYPES: list[object] = [
    Everything,
    pathlib.Path,
    SecretStr,
    bytes,
    set[int],
    frozenset[str],
    decimal.Decimal,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    AnyUrl,
    HttpUrl,
    IPvAnyAddress,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    tuple[int, str],
    dict[str, int],
    dict[Literal["a", "b.c", 'd"e'], int],
    dict[Annotated[str, Field(min_length=1, max_length=3)], bool],
    Mapping[str, Sequence[int]],
    PositiveInt,
    Annotated[int, Field(multiple_of=5, gt=3, le=20)],
]
# What only their libraries check, JSON Schema calls a note.
NOTES: list[object] = [PostgresDsn, Base64Bytes, ipaddress.IPv4Network, Json]

ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
OTHERS: dict[str, dict[str, JsonValue]] = {
    "zod 3": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "cuid"},
            "mail": {"type": "string", "format": "email"},
            "record": {
                "type": "object",
                "additionalProperties": {"type": "number"},
                "propertyNames": {"minLength": 1, "maxLength": 3},
            },
            "never": {"not": {}},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["id", "mail"],
        "additionalProperties": False,
    },
    "zod 4": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        "maxProperties": 2,
    },
    "a decimal of older versions": {"type": "string", "pattern": DECIMAL},
    "OpenAPI": {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "format": "int64", "minimum": 0, "exclusiveMinimum": True},
            "most": {"type": "integer", "minimum": 7, "maximum": 9, "exclusiveMaximum": True},
            "any": {"type": "integer", "minimum": 7, "maximum": 9, "exclusiveMaximum": False},
            "word": {"type": "string", "format": "password", "nullable": True, "example": "x"},
        },
        "required": ["count", "most", "any"],
        "discriminator": {"propertyName": "word"},
    },
    "data that looks like a schema": {
        "enum": [{"format": "colour", "not": {}, "uniqueItems": True}, {"exclusiveMinimum": True}]
    },
    "properties that are called like keywords": {
        "type": "object",
        "properties": {
            "format": {"const": "colour"},
            "uniqueItems": {"type": "boolean"},
            "propertyNames": {"type": "null"},
            "not": {"type": "null"},
        },
        "required": ["format", "uniqueItems", "propertyNames", "not"],
        "additionalProperties": False,
    },
    "names by a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^k[0-9]$"},
        "additionalProperties": {"type": "boolean"},
    },
    "a narrower format": {"type": "string", "format": "idn-email"},
}


def walks(schema: JsonValue) -> list[str]:
    """What a model at random, that likes to come to an end, writes under a schema."""
    prototype = LLMatcher(TOKENIZER, grammar_of("json", json.dumps(schema)), limits=LIMITS)
    assert not prototype.is_error(), prototype.get_error()
    finished = []
    for seed in range(WALKS):
        matcher, rng, written = prototype.deep_copy(), random.Random(seed), bytearray()
        while not matcher.is_stopped() and len(written) < 3000:
            mask = matcher.compute_bitmask()
            able = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            ends = [byte for byte in able if byte in b'"}],0']
            simple = [byte for byte in able if 32 <= byte < 127 and byte != ord("\\")] or able
            if not able or (matcher.is_accepting() and rng.random() < 0.5):
                break
            byte = rng.choice(ends if ends and rng.random() < 0.6 else simple)
            assert matcher.consume_token(byte)
            written.append(byte)
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_accepting() or matcher.is_stopped():
            finished.append(written.decode())
    assert len(finished) > WALKS / 2
    return finished


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_what_pydantic_asks_for_pydantic_takes(kind, mode):
    """It makes sets of lists, so the items of a list need not differ."""
    adapter = TypeAdapter(kind)
    for text in walks(adapter.json_schema(mode=mode)):
        if mode == "validation":
            try:
                adapter.validate_json(text)
            except ValidationError as error:  # what no schema says: of year 0, of finite decimals
                kinds = {each["type"] for each in error.errors()}
                allowed = {"decimal_parsing"}
                assert kinds <= allowed | {"url_parsing", "url_scheme", "time_delta_parsing"}, error


def test_dates_are_days_of_the_calendar() -> None:
    schema = respelled({"type": "string", "format": "date"})
    assert isinstance(schema, dict)
    pattern = re.compile(str(schema["pattern"]))
    for year, month, day in itertools.product(
        [0, 1, 4, 100, 400, 999, 1900, 1999, 2000, 2004, 2096, 9999], range(14), range(33)
    ):
        try:
            is_day = bool(datetime.date(year, month, day))
        except ValueError:
            is_day = False
        assert bool(pattern.match(f"{year:04}-{month:02}-{day:02}")) == is_day, (year, month, day)


@pytest.mark.parametrize("kind", NOTES, ids=str)
def test_what_is_only_noted_compiles(kind):
    for text in walks(TypeAdapter(kind).json_schema()):
        assert isinstance(json.loads(text), str)


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_libraries_ask_for_is_what_they_get(name):
    """By jsonschema's reading; of bounds of the old form by that of draft 4 as well."""
    schema = OTHERS[name]
    if name != "OpenAPI":
        check = Draft202012Validator(schema, format_checker=FormatChecker())
        for text in walks(schema):
            check.validate(json.loads(text))
        return
    for text in walks(schema):
        made = json.loads(text)
        assert made["count"] > 0 and made["most"] in (7, 8) and made["any"] in (7, 8, 9)
