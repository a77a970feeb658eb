"""The bodies of requests: JSON objects, parsed strictly."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from pydantic import JsonValue
from pydantic_core import from_json

from penstock.gateway.openai.validation import refuse_extremes
from penstock.schemas.api.json_size import too_much
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import BodyTooLarge, InvalidJob

T = TypeVar("T")


class Body(Protocol):
    async def read(self, understood: Callable[[JsonObject], T]) -> T:
        """Return what `understood` makes of the fields, once.

        A null field at the top counts as absent. Where a name is given twice the last value counts,
        for everything that reads the body.
        """


def parsed(raw: bytes) -> JsonObject:
    """Parse a JSON object, and leave out the null fields at its top.

    A field at the top that is a whole number counts as an integer: some languages write 16 as 16.0.
    Raises BodyTooLarge, InvalidJob.
    """
    if excess := too_much(raw):
        raise BodyTooLarge(f"the body holds {excess}")
    try:
        value: JsonValue = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJob(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJob("the body must be a JSON object")
    refuse_extremes(value)
    return {name: _whole(field) for name, field in value.items() if field is not None}


def _whole(field: JsonValue) -> JsonValue:
    is_whole = isinstance(field, float) and field.is_integer() and abs(field) < 2**53
    return int(field) if is_whole else field  # type: ignore[arg-type]
