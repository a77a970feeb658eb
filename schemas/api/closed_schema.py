"""JSON Schemas whose objects have no other properties than those that are named."""

from pydantic import JsonValue

_SAYS_MORE = frozenset(
    (
        "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "minProperties",
    )
)  # fmt: skip
_MAPS = frozenset(("properties", "$defs", "definitions"))
_DATA = frozenset(("const", "enum", "default", "examples", "example"))
_UNIONS = frozenset(("anyOf", "oneOf"))
_PARTS = frozenset(("allOf", "not", "if", "then", "else"))  # these go with an object's other parts


def closed(schema: JsonValue) -> JsonValue:
    """Return the schema with each object closed that names its properties.

    An object that says itself what else it may have, or is put together of several schemas, stays
    as it is.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_object = isinstance(schema.get("properties"), dict)
    plain = _DATA | _PARTS | (_UNIONS if is_object else frozenset())
    out = {name: value if name in plain else _inside(name, value) for name, value in schema.items()}
    if is_object and _SAYS_MORE.isdisjoint(schema):
        out["additionalProperties"] = False
    return out


def closed_arguments(schema: dict[str, JsonValue]) -> JsonValue:
    """Return the schema of a tool's arguments, closed: those of a tool without any are `{}`."""
    if _SAYS_MORE.isdisjoint(schema):
        schema = {"type": "object", "properties": {}, **schema}
    return closed(schema)


def _inside(name: str, value: JsonValue) -> JsonValue:
    if name in _MAPS and isinstance(value, dict):
        return {key: closed(inner) for key, inner in value.items()}
    return closed(value)
