"""Names of a request's fields that mean nothing here: its response tells them in a header."""

from collections.abc import Iterator, Sequence
from functools import cache

from pydantic import BaseModel, JsonValue

from penstock.gateway.openai.to_job import IN_PARAMS, OPTIONS, STRUCTURES
from penstock.schemas.api.openai import Asked, CustomGrammar, ForeignTool, JsonObject

# Fields of OpenAI's and vLLM's that say nothing of the answer.
_OF_THE_CALLER = {
    "user", "safety_identifier", "prompt_cache_retention", "request_id",
}  # fmt: skip
_EVERYWHERE = IN_PARAMS | {*OPTIONS, "not_before"} | _OF_THE_CALLER
_OPEN = {"messages"}  # what is in them is the chat template's


def ignored(request: Asked, body: JsonObject) -> Sequence[str]:
    """Return the fields of a body that ask for something and are ignored.

    Those inside an object or a list are named by their way: `tools.0.function.x`. A tool that is
    left out is named by its kind: `tools.0.web_search`.
    """
    known_names = _known(type(request))
    names = [name for name, value in body.items() if name not in known_names and value is not None]
    inside = {name: value for name, value in body.items() if name not in _OPEN}
    names += unknown_inside(request, inside, "")
    structures = body.get("structured_outputs")
    if isinstance(structures, dict):
        names += [
            f"structured_outputs.{name}"
            for name, value in structures.items()
            if name not in _STRUCTURES and value is not None
        ]
    return names


def ignored_params(body: JsonObject) -> list[str]:
    """Return the same of the object `params` that a job may have."""
    params = body.get("params")
    fields = params if isinstance(params, dict) else {}
    return [
        f"params.{name}"
        for name, value in fields.items()
        if name not in IN_PARAMS and value is not None
    ]


# Those of vLLM's that ask for something are refused.
_STRUCTURES = STRUCTURES | {
    "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties",
}  # fmt: skip


def unknown_inside(model: BaseModel, raw: JsonObject, way: str) -> Iterator[str]:
    """Yield the unknown fields of the objects that are fields of the object `raw`."""
    for name, field in type(model).model_fields.items():
        key = field.alias or name
        yield from _unknown(getattr(model, name), raw.get(key), way + key)


def _unknown(field: object, raw: JsonValue, way: str) -> Iterator[str]:
    """Yield the unknown fields of what a field was made of."""
    if isinstance(field, list) and isinstance(raw, list):
        if not field or not isinstance(field[0], BaseModel):
            return  # it may be a prompt of a million tokens
        for place, (item, raw_item) in enumerate(zip(field, raw, strict=True)):
            yield from _unknown(item, raw_item, f"{way}.{place}")
    elif isinstance(field, ForeignTool):
        yield f"{way}.{field.type}"
    elif isinstance(field, BaseModel) and isinstance(raw, dict):
        if isinstance(field, CustomGrammar) and not field.is_held:
            yield f"{way}.definition"
        if field.model_config.get("extra") != "allow":
            known_names = _names(type(field))
            yield from (
                f"{way}.{name}"
                for name, value in raw.items()
                if name not in known_names and value is not None
            )
        yield from unknown_inside(field, raw, f"{way}.")


@cache
def _known(request_type: type[Asked]) -> frozenset[str]:
    return frozenset(request_type.model_fields) | _EVERYWHERE


@cache
def _names(model_type: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model_type.model_fields.items())
