"""The base classes of all values that pass between processes."""

import logging
from typing import TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

log = logging.getLogger(__name__)
Shape = TypeVar("Shape", bound=BaseModel)


class Wire(BaseModel):
    """A value that is checked on arrival and never changed.

    Unknown fields are refused: a worker that does not know a field would answer another question
    than the one asked. Defaults are not written (`dump`), so a newer gateway and an older worker
    disagree only about jobs that use what the worker lacks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def dump(self) -> str:
        return self.model_dump_json(exclude_defaults=True, by_alias=True)


class Report(Wire):
    """A value that flows back to readers, who skip what they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def read_or_none(shape: type[Shape], text: bytes) -> Shape | None:
    """Read a record that others wrote. Return None, and log it, where it is not of this shape."""
    try:
        return shape.model_validate_json(text)
    except ValidationError:
        log.warning("a %s could not be read and counts as none", shape.__name__)
        return None


def at_most_bytes(limit: int) -> AfterValidator:
    """Return a validator of a text's size in UTF-8, which is up to four bytes a character."""

    def check(text: str) -> str:
        if (count := len(text.encode())) > limit:
            raise ValueError(f"at most {limit} bytes of UTF-8; it has {count}")
        return text

    return AfterValidator(check)
