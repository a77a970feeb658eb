"""A histogram that one process counts and another publishes."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from pydantic import JsonValue


class Tally:
    """Observations, counted by buckets whose bounds who publishes them knows too."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def dump(self) -> list[float]:
        """Return the sum, and the count of each bucket up to the last one that is not empty."""
        used = len(self._counts)
        while used and not self._counts[used - 1]:
            used -= 1
        return [round(self._sum, 6), *self._counts[:used]]


def read_dump(bounds: Sequence[float], dump: JsonValue) -> tuple[float, list[float]] | None:
    """Return the sum, and how many observations were at most each bound; the last has no bound.

    Return None where it is no dump of such buckets: any client of Redis may have written it.
    """
    if not isinstance(dump, list) or not 1 <= len(dump) <= len(bounds) + 2:
        return None
    numbers = [float(each) for each in dump if isinstance(each, int | float)]
    if len(numbers) != len(dump) or min(numbers[1:], default=0) < 0:
        return None
    total, *counts = numbers
    counts += [0.0] * (len(bounds) + 1 - len(counts))
    return total, list(accumulate(counts))
