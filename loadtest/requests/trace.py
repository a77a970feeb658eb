"""Traces of what real users asked: when, how much, and what of it they shared; never the texts.

Two forms are read. Mooncake's is JSON lines: timestamp in milliseconds, input_length,
output_length, and hash_ids, which name the prompt's blocks of 512 tokens, so that prompts with the
same first ids share their beginning. Azure's is CSV: TIMESTAMP, ContextTokens, GeneratedTokens.
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.loadtest.errors import BadOption
from penstock.loadtest.requests.workload import Request, random_ids

BLOCK = 512  # tokens that one of hash_ids stands for
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Arrival(msgspec.Struct):
    """One line of a trace."""

    timestamp: float  # milliseconds
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int] = []


def read_trace(
    path: Path, vocab_size: int, speed: float = 1.0, seed: int = 0, most: int | None = None
) -> list[Request]:
    """Return a trace's requests by their times, the first at zero; their prompts are random ids.

    `most` is how many are read, from the first on. Raises BadOption with the number of a bad line
    and the name of its field.
    """
    lines = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    try:
        arrivals = sorted(lines, key=lambda arrival: arrival.timestamp)
    except OSError as error:
        raise BadOption(f"--dataset-path: {path}: {error.strerror}") from error
    if not arrivals:
        raise BadOption(f"--dataset-path: {path}: it is empty")
    return [
        Request(
            _prompt(arrival, number, vocab_size, seed),
            arrival.output_length,
            due_s=(arrival.timestamp - arrivals[0].timestamp) / 1e3 / speed,
        )
        for number, arrival in enumerate(arrivals[:most])
    ]


def _prompt(arrival: _Arrival, number: int, vocab_size: int, seed: int) -> list[int]:
    """Return the ids of the blocks that the trace names, and after them ids of its own."""
    ids: list[int] = []
    for block in arrival.hash_ids:
        ids += random_ids(BLOCK, vocab_size, (seed, 0, block))
    rest = max(0, arrival.input_length - len(ids))
    return ids[: arrival.input_length] + random_ids(rest, vocab_size, (seed, 1, number))


def _mooncake(path: Path) -> Iterator[_Arrival]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line, type=_Arrival)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadOption(f"--dataset-path: {path}: line {number}: {error}") from error


def _azure(path: Path) -> Iterator[_Arrival]:
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                at, num_in, num_out = (row[name] for name in _AZURE)
                at_ms = datetime.fromisoformat(at[:26]).timestamp() * 1e3
                fields = {"timestamp": at_ms, "input_length": int(num_in)}
                yield msgspec.convert(fields | {"output_length": int(num_out)}, _Arrival)
            except (KeyError, TypeError, ValueError) as error:
                columns = f"it has the columns {', '.join(_AZURE)}"
                raise BadOption(
                    f"--dataset-path: {path}: line {number}: {error}; {columns}"
                ) from error
