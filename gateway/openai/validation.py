"""Validation of JSON that callers sent. An error names the field that is wrong."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json

from penstock.schemas.api.json_size import MAX_GROUPS, MAX_VALUES, too_much
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import BodyTooLarge, InvalidJob

# Deeper than any real schema; far from the 200 levels at which JSON parsers down the line give up.
MAX_DEPTH = 64
MAX_FIELDS = 4096  # fields of one object: each may bring an error of its own
_MOST_NAMED = 16  # other fields that are wrong and are named
FIELD_PREFIX = re.compile(r"([a-z_]+): ")

Shape = TypeVar("Shape", bound=BaseModel)


def validate(
    shape: type[Shape], fields: Mapping[str, object], caller_names: Mapping[str, str] | None = None
) -> Shape:
    """Return `fields` as a `shape`, with types taken strictly. Raises InvalidJob.

    `caller_names` maps a field at the top to the caller's name for it. An empty name means that the
    caller gives the inner fields of this field at the top.
    """
    try:
        return shape.model_validate_json(to_json(fields), strict=True)
    except ValidationError as refusal:
        raise _invalid(refusal.errors(include_url=False), fields, caller_names or {}) from None


def parsed(raw: bytes) -> JsonObject:
    """Parse a JSON object, and leave out the null fields at its top.

    A field at the top that is a whole number counts as an integer: some languages write 16 as 16.0.
    Raises BodyTooLarge, InvalidJob.
    """
    if excess := too_much(raw):
        raise BodyTooLarge(f"the body holds {excess}")
    try:
        value: JsonValue = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJob(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJob("the body must be a JSON object")
    refuse_extremes(value)
    return {name: _whole(field) for name, field in value.items() if field is not None}


def _whole(field: JsonValue) -> JsonValue:
    is_whole = isinstance(field, float) and field.is_integer() and abs(field) < 2**53
    return int(field) if is_whole else field  # type: ignore[arg-type]


def refuse_extremes(value: JsonValue) -> None:
    """Refuse JSON that no later step should have to read.

    Raises InvalidJob for a number past a float's range and for nesting past `MAX_DEPTH`, both of
    which the parser lets through, and BodyTooLarge for too many values, objects, lists or fields.
    """
    level, num_groups, num_values = [value], 0, 0
    for _ in range(MAX_DEPTH):
        num_groups += len(level)
        if num_groups > MAX_GROUPS:
            raise BodyTooLarge(f"the body holds more than {MAX_GROUPS} lists and objects")
        if any(isinstance(node, dict) and len(node) > MAX_FIELDS for node in level):
            raise BodyTooLarge(f"the body holds an object of more than {MAX_FIELDS} fields")
        inner = [child for node in level for child in _children(node)]
        num_values += len(inner)
        if num_values > MAX_VALUES + MAX_GROUPS:  # a group has one comma less than values
            raise BodyTooLarge(f"the body holds more than {MAX_VALUES} values")
        if any(isinstance(child, float) and math.isinf(child) for child in inner):
            raise InvalidJob("the body holds a number outside the range of a 64-bit float")
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return
    raise InvalidJob(f"the body is nested deeper than {MAX_DEPTH} levels")


def _children(node: JsonValue) -> Iterable[JsonValue]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _invalid(
    errors: list[ErrorDetails], fields: Mapping[str, object], caller_names: Mapping[str, str]
) -> InvalidJob:
    """Return the error that reaches deepest, with the names of other fields that are wrong.

    Where no branch of a union fits, that is an error of the branch that fits best.
    """
    places = [(_location(error, fields), error) for error in errors]
    steps, error = max(places, key=lambda pair: len(pair[0]))
    message, excerpt = error["msg"], ""
    if error["type"] == "value_error":  # raised by our own validators, which begin with the field
        message = message.removeprefix("Value error, ")
        if prefix := FIELD_PREFIX.match(message):
            steps, message = [*steps, prefix[1]], message[prefix.end() :]
    elif error["type"] != "missing" and not isinstance(error["input"], dict | list):
        excerpt = f", got {error['input']!r:.60}"
    param = _param(steps, caller_names)
    tops = dict.fromkeys(_top(_param(place, caller_names)) for place, _ in places)
    names = [name for name in tops if name not in ("", _top(param))]
    beside = (place for place, fault in places if fault["type"] == error["type"] and place != steps)
    names += [_param(place, caller_names) for place in beside if place[:-1] == steps[:-1]]
    names = [name for name in dict.fromkeys(names) if name]
    more = f"; also wrong: {', '.join(names[:_MOST_NAMED])}" if names else ""
    sentence = f"{message}{excerpt}{more}"
    return InvalidJob(f"{param}: {sentence}" if param else sentence, param or None)


def _location(error: ErrorDetails, fields: Mapping[str, object]) -> list[str | int]:
    """Return the steps of pydantic's location that exist in `fields`, and a missing field's."""
    steps: list[str | int] = []
    node: object = fields
    for step in error["loc"]:
        is_name = isinstance(node, dict) and step in node  # else it names a branch of a union
        if is_name or (isinstance(node, list) and isinstance(step, int) and step < len(node)):
            steps.append(step)
            node = node[step]  # type: ignore[index]
    return [*steps, error["loc"][-1]] if error["type"] == "missing" else steps


def _top(path: str) -> str:
    """Return the field at the top of a path."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _param(steps: list[str | int], caller_names: Mapping[str, str]) -> str:
    """Return the steps as a path, such as `messages[0].content`."""
    names = [
        caller_names.get(str(step), step) if at == 0 else step for at, step in enumerate(steps)
    ]
    texts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names if name != ""]
    return "".join(texts).removeprefix(".")
