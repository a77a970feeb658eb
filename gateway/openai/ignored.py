"""Names of a request's fields that mean nothing here: its response tells them in a header."""

from collections.abc import Sequence
from functools import cache

from penstock.gateway.openai.to_job import IN_PARAMS, OPTIONS
from penstock.schemas.openai import Asked, JsonObject

# Fields of OpenAI's and vLLM's that say nothing of the answer.
_OF_THE_CALLER = {
    "user", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id",
}  # fmt: skip
_EVERYWHERE = IN_PARAMS | {*OPTIONS, "not_before"} | _OF_THE_CALLER


def ignored(asked: type[Asked], body: JsonObject) -> Sequence[str]:
    """Return the fields of a body that ask for something and are ignored."""
    known = _known(asked)
    return [name for name, value in body.items() if name not in known and value is not None]


def ignored_params(body: JsonObject) -> list[str]:
    """Return the same of the object `params` that a job may have."""
    params = body.get("params")
    given = params if isinstance(params, dict) else {}
    return [
        f"params.{name}"
        for name, value in given.items()
        if name not in IN_PARAMS and value is not None
    ]


@cache
def _known(asked: type[Asked]) -> frozenset[str]:
    return frozenset(asked.model_fields) | _EVERYWHERE
