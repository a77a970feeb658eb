"""JSON of large answers, made in small pieces so that other threads can run in between."""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import to_json

from penstock.schemas.event import fields_of_struct

SLICE = 64  # items of a list that are written at once
DEPTH = 6  # down to the log probabilities of a job's result; what lies deeper is small


def to_json_in_pieces(value: object) -> bytes:
    """Return the same JSON as `to_json`, made in calls that each take little time."""
    return b"".join(_pieces(value, DEPTH))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict) and depth:
        yield from _object(value, depth - 1)
    elif isinstance(value, list) and len(value) > SLICE:
        slices = (value[at : at + SLICE] for at in range(0, len(value), SLICE))
        yield (
            b"["
            + b",".join(to_json(items, fallback=fields_of_struct)[1:-1] for items in slices)
            + b"]"
        )
    elif isinstance(value, list) and depth:
        yield from _list(value, depth - 1)
    else:
        yield to_json(value, fallback=fields_of_struct)


def _object(value: dict[str, object], depth: int) -> Iterator[bytes]:
    before = b"{"
    for name, field in value.items():
        yield before + to_json(name) + b":"
        yield from _pieces(field, depth)
        before = b","
    yield b"}" if value else b"{}"


def _list(value: list[object], depth: int) -> Iterator[bytes]:
    before = b"["
    for item in value:
        yield before
        yield from _pieces(item, depth)
        before = b","
    yield b"]" if value else b"[]"
