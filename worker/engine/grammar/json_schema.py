"""Rewrites JSON Schemas, as libraries write them, into equal ones that llguidance compiles.

Keywords that llguidance does not know are left out where JSON Schema says to ignore them, and are
said in other words where that is possible. All others are still refused, with their place in the
schema.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from pydantic import JsonValue

Schema = dict[str, JsonValue]

_MAX_STEP = 60  # characters of a name that an error shows
MAX_PROBES = 200  # parts of a schema to try, to find the one that is refused

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# A text of the format on the right is also one of the format on the left.
_NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
    "uri-template": "uri",
    "multi-host-uri": "uri",
    "ipvanyaddress": "ipv4",
    **{f"uuid{number}": "uuid" for number in range(1, 9)},
}
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# The patterns of pydantic's decimals and zod's addresses, and equal ones without look-around.
_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]" + _DOMAIN
    ),
}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SHARED = ("$defs", "definitions")
_DATA = frozenset(("const", "enum", "default", "example", "examples"))
_ALWAYS: tuple[JsonValue, ...] = ({}, True)


def respelled(schema: JsonValue) -> JsonValue:
    """Return the schema in keywords that llguidance knows, in every part where that is possible."""
    if isinstance(schema, list):
        return [respelled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "not" in schema and schema["not"] in _ALWAYS:
        return False
    found = {name: _inner(name, value) for name, value in schema.items()}
    for rewrite in (_format, _pattern, _bounds, _names):
        rewrite(found)
    found.pop("uniqueItems", None)  # no grammar can compare items; see docs/http.md
    return found


def parts(schema: JsonValue, path: str = "#") -> Iterator[tuple[str, JsonValue]]:
    """Yield the schemas directly inside a schema, each with its place as a JSON pointer."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in _NAMED and isinstance(value, dict):
                for key, each in value.items():
                    yield f"{path}/{name}/{_step(key)}", each
            elif isinstance(value, dict) and name not in _DATA:
                yield f"{path}/{_step(name)}", value
            elif isinstance(value, list) and name not in _DATA:
                for number, each in enumerate(value):
                    if isinstance(each, dict):
                        yield f"{path}/{_step(name)}/{number}", each


def place_of(schema: Schema, reason: str, why: Callable[[Schema], str | None]) -> str:
    """Return the place, as a JSON pointer, of the innermost part that is refused for that reason.

    why  returns the reason why a schema is refused by itself; None where it is not refused
    """
    shared: Schema = {name: schema[name] for name in _SHARED if name in schema}
    here, part, left = "#", schema, MAX_PROBES
    while left > 0:
        inner = list(islice(parts(part, here), left))
        left -= len(inner) + 1
        for path, each in inner:
            if isinstance(each, dict) and why(shared | each) == reason:
                here, part = path, each
                break
        else:
            break
    return here


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:_MAX_STEP]


def _inner(name: str, value: JsonValue) -> JsonValue:
    if name in _DATA:
        return value
    if name in _NAMED and isinstance(value, dict):
        return {key: respelled(each) for key, each in value.items()}
    return respelled(value)


def _format(schema: Schema) -> None:
    """Replace a format that llguidance does not know by a narrower one, or drop it.

    JSON Schema lets unknown formats be ignored.
    """
    wanted = schema.get("format")
    if isinstance(wanted, str) and wanted not in _FORMATS:
        del schema["format"]
        if wanted in _NARROWER:
            schema["format"] = _NARROWER[wanted]


def _pattern(schema: Schema) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and pattern in _PATTERNS:
        schema["pattern"] = _PATTERNS[pattern]
        schema.pop("format", None)  # which the pattern implies


def _bounds(schema: Schema) -> None:
    """Rewrite the bounds of OpenAPI 3.0 and draft 4, where an exclusive bound is a boolean."""
    for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(name), bool) and schema.pop(name) and bound in schema:
            schema[name] = schema.pop(bound)


def _names(schema: Schema) -> None:
    """Rewrite `propertyNames` as `patternProperties`."""
    names = schema.get("propertyNames")
    if names in _ALWAYS or names == {"type": "string"}:
        del schema["propertyNames"]
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties"}:
        return
    values = schema.get("additionalProperties", True)
    told = names.keys() - {"type"}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if told in ({"enum"}, {"const"}) and isinstance(listed, list):
        texts = "|".join(_literal(each) for each in listed if isinstance(each, str))
        schema["patternProperties"] = {f"^({texts})$": values}
    elif told == {"pattern"}:
        schema["patternProperties"] = {str(names["pattern"]): values}
    elif told and told <= {"minLength", "maxLength"}:
        lengths = _lengths(names)
        schema["patternProperties"] = {f"^(.|\n){{{lengths}}}$": values}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _literal(text: str) -> str:
    return "".join(f"\\{sign}" if sign in r".^$|?*+()[]{}/\-" else sign for sign in text)


def _lengths(names: Mapping[str, JsonValue]) -> str:
    return f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
