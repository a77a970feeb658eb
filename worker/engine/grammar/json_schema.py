"""Rewrites JSON Schemas, as libraries write them, into equal ones that llguidance compiles.

Keywords that llguidance does not know are left out where JSON Schema says to ignore them, and are
said in other words where that is possible. All others are still refused, with their place in the
schema, or are left out of a schema that need not be held whole.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from pydantic import JsonValue

from penstock.worker.engine.grammar.one_of import Schema, without_one_of

_MAX_STEP = 60  # characters of a name that an error shows
MAX_PROBES = 200  # parts of a schema to try, to find the one that is refused

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Days of the calendar, of the years 1 to 9999, and no leap second: RFC 3339 has few more texts,
# and the readers of most languages do without those.
_LEAP = r"0[48]|[2468][048]|[13579][26]"
_DATE = (
    r"((\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-("
    r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|(\d\d({_LEAP})|({_LEAP})00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OF_FORMAT = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
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
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_DATA = frozenset(("const", "enum", "default", "example", "examples"))
_ALWAYS: tuple[JsonValue, ...] = ({}, True)


def respelled(schema: Schema) -> JsonValue:
    """Return the schema in keywords that llguidance knows, in every part where that is possible."""
    return _respelled(schema, schema)


def _respelled(schema: JsonValue, root: Schema) -> JsonValue:
    if isinstance(schema, list):
        return [_respelled(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "not" in schema and schema["not"] in _ALWAYS:
        return False
    if "$id" in schema:
        root = schema
    result = _with_parts(schema, lambda part: _respelled(part, root))
    for rewrite in (_format, _pattern, _bounds, _names):
        rewrite(result)
    without_one_of(result, root)
    result.pop("uniqueItems", None)  # no grammar can compare items; see docs/http.md
    return result


def loosened(schema: JsonValue, is_pattern: Callable[[str], bool]) -> JsonValue:
    """Return the schema without names of other documents, and patterns that are none here."""
    if isinstance(schema, list):
        return [loosened(part, is_pattern) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = _with_parts(schema, lambda part: loosened(part, is_pattern))
    reference, pattern = result.get("$ref"), result.get("pattern")
    if isinstance(reference, str) and not reference.startswith("#"):
        del result["$ref"]
    result.pop("$schema", None)
    if isinstance(pattern, str) and not is_pattern(pattern):
        del result["pattern"]
    patterns = result.get("patternProperties")
    if isinstance(patterns, dict) and not all(map(is_pattern, patterns)):
        del result["patternProperties"]
        result.pop("additionalProperties", None)
    return result


def parts(schema: JsonValue, path: str = "#") -> Iterator[tuple[str, JsonValue]]:
    """Yield the schemas directly inside a schema, each with its place as a JSON pointer."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in _SCHEMA_MAPS and isinstance(value, dict):
                for key, part in value.items():
                    yield f"{path}/{name}/{_step(key)}", part
            elif isinstance(value, dict) and name not in _DATA:
                yield f"{path}/{_step(name)}", value
            elif isinstance(value, list) and name not in _DATA:
                for number, part in enumerate(value):
                    if isinstance(part, dict):
                        yield f"{path}/{_step(name)}/{number}", part


def place_of(schema: Schema, reason: str, why: Callable[[Schema], str | None]) -> str:
    """Return the place, as a JSON pointer, of the innermost part that is refused for that reason.

    why  returns the reason why a schema is refused by itself; None where it is not refused
    """
    definitions: Schema = {name: schema[name] for name in _DEFINITIONS if name in schema}
    here, part, budget = "#", schema, MAX_PROBES
    while budget > 0:
        inner = list(islice(parts(part, here), budget))
        budget -= len(inner) + 1
        for path, candidate in inner:
            if isinstance(candidate, dict) and why(definitions | candidate) == reason:
                here, part = path, candidate
                break
        else:
            break
    return here


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:_MAX_STEP]


def _with_parts(schema: Schema, change: Callable[[JsonValue], JsonValue]) -> Schema:
    """Return the schema with each schema, or list of them, directly inside it changed."""

    def changed(name: str, value: JsonValue) -> JsonValue:
        if name in _DATA:
            return value
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            return {key: change(part) for key, part in value.items()}
        return change(value)

    return {name: changed(name, value) for name, value in schema.items()}


def _format(schema: Schema) -> None:
    """Replace a format that llguidance does not know by a narrower one, or drop it.

    JSON Schema lets unknown formats be ignored. Those of dates and times become patterns.
    """
    name = schema.get("format")
    if isinstance(name, str) and name in _OF_FORMAT and "pattern" not in schema:
        del schema["format"]
        schema["pattern"] = _OF_FORMAT[name]
    elif isinstance(name, str) and name not in _FORMATS:
        del schema["format"]
        if name in _NARROWER:
            schema["format"] = _NARROWER[name]


def _pattern(schema: Schema) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and pattern in _PATTERNS:
        schema["pattern"] = _PATTERNS[pattern]
        schema.pop("format", None)  # the pattern implies it


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
    keywords = names.keys() - {"type"}
    choices = names.get("enum", [names["const"]] if "const" in names else None)
    if keywords in ({"enum"}, {"const"}) and isinstance(choices, list):
        texts = "|".join(_literal(choice) for choice in choices if isinstance(choice, str))
        schema["patternProperties"] = {f"^({texts})$": values}
    elif keywords == {"pattern"}:
        schema["patternProperties"] = {str(names["pattern"]): values}
    elif keywords and keywords <= {"minLength", "maxLength"}:
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
