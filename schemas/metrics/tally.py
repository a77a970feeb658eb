"""A histogram that one process counts and another publishes."""

import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pydantic import JsonValue

TRACE_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Example:
    """An observation that leads to its trace, and when it was made, in unix seconds."""

    value: float
    trace_id: str
    at_s: float

    def dump(self) -> list[JsonValue]:
        return [round(self.value, 6), self.trace_id, round(self.at_s, 3)]


class Tally:
    """Observations, counted by buckets whose bounds who publishes them knows too.

    example  the latest one that has a trace
    """

    __slots__ = ("_bounds", "_counts", "_sum", "example")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0
        self.example: Example | None = None

    def observe(self, value: float, trace_id: str | None = None) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        if trace_id is not None:
            self.example = Example(value, trace_id, time.time())

    def dump(self) -> list[float]:
        """Return the sum, and the count of each bucket up to the last one that is not empty."""
        size = len(self._counts)
        while size and not self._counts[size - 1]:
            size -= 1
        return [round(self._sum, 6), *self._counts[:size]]


def read_dump(bounds: Sequence[float], dump: JsonValue) -> tuple[float, list[float]] | None:
    """Return the sum, and how many observations were at most each bound; the last has no bound.

    Return None where it is no dump of such buckets: any client of Redis may have written it.
    """
    if not isinstance(dump, list) or not 1 <= len(dump) <= len(bounds) + 2:
        return None
    numbers = [float(number) for number in dump if isinstance(number, int | float)]
    if len(numbers) != len(dump) or min(numbers[1:], default=0) < 0:
        return None
    total, *counts = numbers
    counts += [0.0] * (len(bounds) + 1 - len(counts))
    return total, list(accumulate(counts))


def read_example(dump: JsonValue) -> Example | None:
    """Return what `Example.dump` wrote, or None: any client of Redis may have written it."""
    match dump:
        case [int() | float() as value, str() as trace_id, int() | float() as at_s]:
            return Example(value, trace_id, at_s) if TRACE_ID.fullmatch(trace_id) else None
    return None
