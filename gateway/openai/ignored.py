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


def ignored(asked: Asked, body: JsonObject) -> Sequence[str]:
    """Return the fields of a body that ask for something and are ignored.

    Those inside an object or a list are named by their way: `tools.0.function.x`. A tool that is
    left out is named by its kind: `tools.0.web_search`.
    """
    known = _known(type(asked))
    names = [name for name, value in body.items() if name not in known and value is not None]
    inside = {name: value for name, value in body.items() if name not in _OPEN}
    names += unknown_inside(asked, inside, "")
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
    given = params if isinstance(params, dict) else {}
    return [
        f"params.{name}"
        for name, value in given.items()
        if name not in IN_PARAMS and value is not None
    ]


# Those of vLLM's that ask for something are refused.
_STRUCTURES = STRUCTURES | {
    "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties",
}  # fmt: skip


def unknown_inside(made: BaseModel, given: JsonObject, way: str) -> Iterator[str]:
    """Yield the unknown fields of the objects that are fields of the object `given`."""
    for name, field in type(made).model_fields.items():
        shown = field.alias or name
        yield from _unknown(getattr(made, name), given.get(shown), way + shown)


def _unknown(made: object, given: JsonValue, way: str) -> Iterator[str]:
    """Yield the unknown fields of what a field was made of."""
    if isinstance(made, list) and isinstance(given, list):
        if not made or not isinstance(made[0], BaseModel):
            return  # it may be a prompt of a million tokens
        for place, (each, of_each) in enumerate(zip(made, given, strict=True)):
            yield from _unknown(each, of_each, f"{way}.{place}")
    elif isinstance(made, ForeignTool):
        yield f"{way}.{made.type}"
    elif isinstance(made, BaseModel) and isinstance(given, dict):
        if isinstance(made, CustomGrammar) and not made.is_held:
            yield f"{way}.definition"
        if made.model_config.get("extra") != "allow":
            known = _names(type(made))
            yield from (
                f"{way}.{name}"
                for name, value in given.items()
                if name not in known and value is not None
            )
        yield from unknown_inside(made, given, f"{way}.")


@cache
def _known(asked: type[Asked]) -> frozenset[str]:
    return frozenset(asked.model_fields) | _EVERYWHERE


@cache
def _names(made: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in made.model_fields.items())
