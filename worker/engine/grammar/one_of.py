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
    if "object" in types and (disjoint := _by_required(alternatives)) is not None:
        alternatives = disjoint
        schema["type"] = "object"  # what is none matches all of them
    elif not all(
        _are_exclusive(first, second, root, _MAX_DEPTH, types)
        for first, second in combinations(alternatives, 2)
    ):
        return
    del schema["oneOf"]
    schema["anyOf"] = alternatives


def _by_required(alternatives: list[JsonValue]) -> list[JsonValue] | None:
    """Return alternatives that only ask for properties as ones that forbid the others' as well.

    None where they say more, or where that cannot be said of one property at a time.
    """
    schemas: list[Schema] = []
    for alternative in alternatives:
        if not isinstance(alternative, dict) or alternative.keys() - _NOTES != {"required"}:
            return None
        schemas.append(alternative)
    result: list[JsonValue] = []
    for place, own in enumerate(schemas):
        names = _required(own)
        extras = [_required(schema) - names for at, schema in enumerate(schemas) if at != place]
        if not all(extras):
            continue  # who matches this one matches another, too
        if any(len(extra) > 1 for extra in extras):
            return None
        properties: Schema = {name: False for extra in extras for name in sorted(extra)}
        result.append({"required": own["required"], "properties": properties})
    return result


def _are_exclusive(
    first: JsonValue,
    second: JsonValue,
    root: Schema,
    depth: int,
    types: frozenset[str] = _TYPES,
) -> bool:
    """Return whether it is certain that no value of these types matches both schemas."""
    if depth == 0:
        return False
    firsts, seconds = list(_all_of(first, root)), list(_all_of(second, root))
    return any(_differ(a, b, root, depth, types) for a in firsts for b in seconds)


def _all_of(schema: JsonValue, root: Schema) -> Iterator[Schema | bool]:
    """Yield schemas that all values of a schema match: itself, what it refers to, its `allOf`."""
    todo, count = [schema], 0
    while todo and count < 2 * _MAX_DEPTH:
        part, count = todo.pop(), count + 1
        if isinstance(part, bool):
            yield part
        if not isinstance(part, dict):
            continue
        reference, parts = part.get("$ref"), part.get("allOf")
        if isinstance(reference, str):
            todo.append(_target(reference, root))
            continue  # what is beside a reference counts in the later drafts alone
        yield part
        if isinstance(parts, list):
            todo += parts


def _target(reference: str, root: Schema) -> JsonValue:
    """Return the part of the schema that a local reference names; None where there is none."""
    start, *steps = reference.split("/")
    if start != "#" or "%" in reference:
        return None
    part: JsonValue = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict) and "$id" in part:
            return None  # the references inside it are its own
    return part


def _differ(
    first: Schema | bool, second: Schema | bool, root: Schema, depth: int, types: frozenset[str]
) -> bool:
    if first is False or second is False:
        return True
    if first is True or second is True:
        return False
    for schema, counterpart in ((first, second), (second, first)):
        for name in ("anyOf", "oneOf"):
            parts = schema.get(name)
            if isinstance(parts, list) and all(
                _are_exclusive(part, counterpart, root, depth - 1, types) for part in parts
            ):
                return True
    of_first, of_second = _values(first), _values(second)
    if of_first is not None and of_second is not None:
        return not any(_is_equal(a, b) for a in of_first for b in of_second)
    common_types = types & _types(first) & _types(second)
    if of_first is not None:
        common_types &= _types_of(of_first)
    if of_second is not None:
        common_types &= _types_of(of_second)
    if not common_types:
        return True
    return common_types == _OBJECT and _objects_differ(first, second, root, depth)


def _objects_differ(first: Schema, second: Schema, root: Schema, depth: int) -> bool:
    """Return whether a property that one of them asks for cannot be as the other one wants it."""
    for schema, counterpart in ((first, second), (second, first)):
        own, foreign = _properties(schema), _properties(counterpart)
        for name in sorted(_required(schema)):
            if name not in foreign and _is_closed(counterpart):
                return True
            if _are_exclusive(own.get(name, True), foreign.get(name, True), root, depth - 1):
                return True
    return False


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that a schema names; all of them where it names none."""
    value = schema.get("type")
    names = value if isinstance(value, list) else [value]
    types = frozenset(name for name in names if isinstance(name, str))
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
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _is_equal(first: JsonValue, second: JsonValue) -> bool:
    """Return whether two values may be equal in JSON, where true is not 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return first == second or (isinstance(first, list | dict) and isinstance(second, list | dict))


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Schema) -> frozenset[str]:
    value = schema.get("required")
    names = value if isinstance(value, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def _is_closed(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")
