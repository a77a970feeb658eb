"""Rewrites `oneOf` as an equal `anyOf`, where no value can match two of its alternatives.

A grammar can follow any of several alternatives, and cannot count how many of them match.
"""

from collections.abc import Iterator
from itertools import combinations

from pydantic import JsonValue

Schema = dict[str, JsonValue]

_MAX_ALTERNATIVES = 64  # each is compared with each
_MAX_DEPTH = 5  # properties inside properties, and references
_NOTES = frozenset(
    ("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title")
)
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_NUMBERS = frozenset(("integer", "number"))
_OBJECT = frozenset(("object",))


def without_one_of(schema: Schema, root: Schema) -> None:
    """Say `oneOf` as `anyOf` in this part of a schema, if they are equal there.

    Parts inside it are left as they are. References are looked up in `root`.
    """
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list) or "anyOf" in schema:
        return
    if len(alternatives) > _MAX_ALTERNATIVES:
        return
    types = _types(schema)
    if "object" in types and (made := _by_required(alternatives)) is not None:
        alternatives = made
        schema["type"] = "object"  # what is none matches all of them
    elif not all(
        _are_exclusive(one, other, root, _MAX_DEPTH, types)
        for one, other in combinations(alternatives, 2)
    ):
        return
    del schema["oneOf"]
    schema["anyOf"] = alternatives


def _by_required(alternatives: list[JsonValue]) -> list[JsonValue] | None:
    """Return alternatives that only ask for properties as ones that forbid the others' as well.

    None where they say more, or where that cannot be said of one property at a time.
    """
    asked: list[Schema] = []
    for each in alternatives:
        if not isinstance(each, dict) or each.keys() - _NOTES != {"required"}:
            return None
        asked.append(each)
    made: list[JsonValue] = []
    for place, own in enumerate(asked):
        names = _required(own)
        others = [_required(each) - names for at, each in enumerate(asked) if at != place]
        if not all(others):
            continue  # who matches this one matches another, too
        if any(len(each) > 1 for each in others):
            return None
        forbidden: Schema = {name: False for each in others for name in sorted(each)}
        made.append({"required": own["required"], "properties": forbidden})
    return made


def _are_exclusive(
    one: JsonValue,
    other: JsonValue,
    root: Schema,
    depth: int,
    types: frozenset[str] = _TYPES,
) -> bool:
    """Return whether it is certain that no value of these types matches both schemas."""
    if depth == 0:
        return False
    ones, others = list(_all_of(one, root)), list(_all_of(other, root))
    return any(_differ(a, b, root, depth, types) for a in ones for b in others)


def _all_of(schema: JsonValue, root: Schema) -> Iterator[Schema | bool]:
    """Yield schemas that all values of a schema match: itself, what it refers to, its `allOf`."""
    todo, seen = [schema], 0
    while todo and seen < 2 * _MAX_DEPTH:
        each, seen = todo.pop(), seen + 1
        if isinstance(each, bool):
            yield each
        if not isinstance(each, dict):
            continue
        reference, parts = each.get("$ref"), each.get("allOf")
        if isinstance(reference, str):
            todo.append(_target(reference, root))
            continue  # what is beside a reference counts in the later drafts alone
        yield each
        if isinstance(parts, list):
            todo += parts


def _target(reference: str, root: Schema) -> JsonValue:
    """Return the part of the schema that a local reference names; None where there is none."""
    start, *steps = reference.split("/")
    if start != "#" or "%" in reference:
        return None
    found: JsonValue = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, dict) and "$id" in found:
            return None  # the references inside it are its own
    return found


def _differ(
    one: Schema | bool, other: Schema | bool, root: Schema, depth: int, types: frozenset[str]
) -> bool:
    if one is False or other is False:
        return True
    if one is True or other is True:
        return False
    for either, another in ((one, other), (other, one)):
        for name in ("anyOf", "oneOf"):
            parts = either.get(name)
            if isinstance(parts, list) and all(
                _are_exclusive(part, another, root, depth - 1, types) for part in parts
            ):
                return True
    of_one, of_other = _values(one), _values(other)
    if of_one is not None and of_other is not None:
        return not any(_is_equal(a, b) for a in of_one for b in of_other)
    shared = types & _types(one) & _types(other)
    if of_one is not None:
        shared &= _types_of(of_one)
    if of_other is not None:
        shared &= _types_of(of_other)
    if not shared:
        return True
    return shared == _OBJECT and _objects_differ(one, other, root, depth)


def _objects_differ(one: Schema, other: Schema, root: Schema, depth: int) -> bool:
    """Return whether a property that one of them asks for cannot be as the other one wants it."""
    for either, another in ((one, other), (other, one)):
        own, wanted = _properties(either), _properties(another)
        for name in sorted(_required(either)):
            if name not in wanted and _is_closed(another):
                return True
            if _are_exclusive(own.get(name, True), wanted.get(name, True), root, depth - 1):
                return True
    return False


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that a schema names; all of them where it names none."""
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    types = frozenset(each for each in listed if isinstance(each, str))
    if not types or not types <= _TYPES:
        return _TYPES
    return types | {"integer"} if "number" in types else types


def _types_of(values: list[JsonValue]) -> frozenset[str]:
    types: set[str] = set()
    for value in values:
        if value is None:
            types.add("null")
        elif isinstance(value, bool):
            types.add("boolean")
        elif isinstance(value, int | float):
            types |= _NUMBERS  # 1.0 is an integer
        else:
            types.add({str: "string", list: "array", dict: "object"}[type(value)])
    return frozenset(types)


def _values(schema: Schema) -> list[JsonValue] | None:
    """Return the only values that a schema has; None where they are not listed."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _is_equal(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two values may be equal in JSON, where true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other or (isinstance(one, list | dict) and isinstance(other, list | dict))


def _properties(schema: Schema) -> Schema:
    named = schema.get("properties")
    return named if isinstance(named, dict) else {}


def _required(schema: Schema) -> frozenset[str]:
    named = schema.get("required")
    listed = named if isinstance(named, list) else []
    return frozenset(each for each in listed if isinstance(each, str))


def _is_closed(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")
