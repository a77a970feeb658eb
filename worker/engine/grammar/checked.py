"""Checks a finished completion against a schema that it was held to only in part.

A hostile schema can take for ever: this runs in the sandbox.
"""

import json

import jsonschema_rs
from pydantic import JsonValue

from penstock.worker.engine.grammar.json_schema import respelled

MAX_ERROR = 300  # characters
_MAX_BACKTRACKS = 100_000  # steps back in matching a pattern; what needs more is an error
_UNREADABLE = (ValueError, jsonschema_rs.ReferencingError)


def schema_error(schema: str, answer: str) -> str:
    """Return why the answer is not what the schema says; "" where it is.

    The schema is read as its `$schema` says, or else as draft 2020-12. Nothing is fetched.
    """
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "not checked: brackets inside brackets, too deep"
    schema_value = json.loads(schema)
    try:
        try:
            validator = _validator(schema_value)
        except _UNREADABLE:  # bounds of draft 4 and the like
            validator = _validator(respelled(schema_value))
    except _UNREADABLE as error:
        return _short(f"not checked: {error}")
    violation = next(validator.iter_errors(value), None)
    if violation is None:
        return ""
    place = "".join(f"/{step}" for step in violation.instance_path)
    return _short(f"{place}: {violation.message}" if place else violation.message)


def _validator(schema: JsonValue) -> jsonschema_rs.Validator:
    assert isinstance(schema, dict | bool), "its grammar was made"
    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_MAX_BACKTRACKS)
    return jsonschema_rs.validator_for(schema, offline=True, pattern_options=patterns)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 1] + "…"
