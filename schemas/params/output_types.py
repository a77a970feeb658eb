"""Python types as constraints on a completion, by way of outlines."""

import json

from pydantic import BaseModel, JsonValue

_AS_THEY_ARE = (str, bytes, int, float, list, tuple, dict, type(None), BaseModel)


def constraint_of(value: object) -> object:
    """Return what `StructuredOutputs` is made of, for a type or a term of outlines.

    That is a pydantic model, a dataclass, a TypedDict, an enum, a Literal, a Union, a list or
    another type that outlines knows, or one of its terms (Regex, JsonSchema, CFG, ..). All else is
    returned as it is. Raises ValueError for a type that outlines does not know.
    """
    if isinstance(value, _AS_THEY_ARE):
        return value
    if value is dict:
        return {"json_object": True}
    # Loading outlines takes a second.
    from outlines.types.dsl import (
        CFG,
        Alternatives,
        JsonSchema,
        String,
        python_types_to_terms,
        to_regex,
    )

    try:
        term = python_types_to_terms(value)
        if isinstance(term, JsonSchema):
            schema: JsonValue = json.loads(term.schema)
            return {"json": schema}
        if isinstance(term, CFG):
            return {"grammar": term.definition}
        if isinstance(term, Alternatives):
            texts = [part.value for part in term.terms if isinstance(part, String)]
            if len(texts) == len(term.terms):
                return {"choice": texts}
        return {"regex": to_regex(term)}
    except (TypeError, NotImplementedError, RecursionError) as error:
        raise ValueError(f"structured_outputs: outlines knows no such type: {error}") from error
