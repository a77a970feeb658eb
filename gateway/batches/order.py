"""The order in which a batch's lines run: those that begin alike run one after another.

A worker that has computed a prefix finds it again as long as it is in its cache, and a file may mix
the lines of many prefixes.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic_core import to_json

from penstock.gateway.batches.lines import BatchLine, LinePosition, lines_from
from penstock.schemas.api.openai import JsonObject

# What a model reads, in the order in which it does, whatever the endpoint.
_READ = (
    "model",
    "tools",
    "functions",
    "system",
    "instructions",
    "query",
    "messages",
    "prompt",
    "input",
    "documents",
)
MOST_BEGINNINGS = 64  # beginnings of a line that are compared
_ENTRY = struct.Struct("<IQI")  # an entry of the file: a line's number, its offset and its length


class PlacedLine(NamedTuple):
    """The number of a line in its file, and its place."""

    number: int
    place: LinePosition


def in_groups(bodies: Iterable[JsonObject]) -> list[int]:
    """Return the numbers of bodies so that those that begin alike follow each other.

    Groups, and what is in them, stay in the order in which they first come.
    """
    firsts = dict[bytes, int]()
    keys = [
        (*(firsts.setdefault(digest, number) for digest in _beginnings(body)), number)
        for number, body in enumerate(bodies)
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def write_order(lines: Path, order: Path, is_grouped: bool) -> None:
    """Write the order in which a file's lines run to another file, which is synced to disk.

    It is the same each time.
    """
    places = [place for place, _ in lines_from(lines, 0)]
    numbers = in_groups(_bodies(lines)) if is_grouped else range(len(places))
    part = order.with_suffix(".part")
    with part.open("wb") as sink:
        for number in numbers:
            sink.write(_ENTRY.pack(number, places[number].offset, places[number].length))
        sink.flush()
        os.fsync(sink.fileno())
    part.replace(order)


def read_order(order: Path, begin: int, most: int) -> list[PlacedLine]:
    """Return at most so many lines that follow the first `begin` in their order."""
    with order.open("rb") as source:
        source.seek(begin * _ENTRY.size)
        entries = _ENTRY.iter_unpack(source.read(most * _ENTRY.size))
        return [
            PlacedLine(number, LinePosition(offset, length)) for number, offset, length in entries
        ]


def _bodies(path: Path) -> Iterator[JsonObject]:
    for _, raw in lines_from(path, 0):
        yield BatchLine.model_validate_json(raw).body


def _beginnings(body: JsonObject) -> Iterator[bytes]:
    """Yield a digest of each beginning of what the model reads, the shortest first.

    Those are what ends with a message, and of each message 64 bytes, 128, 256 ..
    """
    read, num_left = hashlib.blake2b(digest_size=16), MOST_BEGINNINGS
    for piece in _pieces(body):
        begin, end = 0, 64
        while begin < len(piece) and num_left:
            read.update(piece[begin:end])
            yield read.digest()
            begin, end, num_left = end, 2 * end, num_left - 1


def _pieces(body: JsonObject) -> Iterator[bytes]:
    for name in _READ:
        field = body.get(name)
        are_ids = isinstance(field, list) and any(isinstance(item, int) for item in field[:1])
        for piece in field if isinstance(field, list) and not are_ids else [field]:
            yield to_json(piece) if piece is not None else b""
