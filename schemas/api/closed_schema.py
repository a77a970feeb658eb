"""JSON Schemas whose objects have no other properties than those that are named."""

from pydantic import JsonValue

_SAYS_MORE = frozenset(
    (
        "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "minProperties",
    )
)  # fmt: skip
_NAMED = frozenset(("properties", "$defs", "definitions"))
_DATA = frozenset(("const", "enum", "default", "examples", "example"))
_EITHER = frozenset(("anyOf", "oneOf"))
_PARTS = frozenset(("allOf", "not", "if", "then", "else"))  # these go with an object's other parts


def closed(schema: JsonValue) -> JsonValue:
    """Return the schema with each object closed that names its properties.

    An object that says itself what else it may have, or is put together of several schemas, stays
    as it is.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_object = isinstance(schema.get("properties"), dict)
    left = _DATA | _PARTS | (_EITHER if is_object else frozenset())
    made = {name: value if name in left else _inside(name, value) for name, value in schema.items()}
    if is_object and _SAYS_MORE.isdisjoint(schema):
        made["additionalProperties"] = False
    return made


def closed_arguments(schema: dict[str, JsonValue]) -> JsonValue:
    """Return the schema of a tool's arguments, closed: those of a tool without any are `{}`."""
    if _SAYS_MORE.isdisjoint(schema):
        schema = {"type": "object", "properties": {}, **schema}
    return closed(schema)


def _inside(name: str, value: JsonValue) -> JsonValue:
    if name in _NAMED and isinstance(value, dict):
        return {key: closed(each) for key, each in value.items()}
    return closed(value)
