"""The points of a sweep: one for each server and load, with its measurement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.loadtest.requests.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Point:
    server: str
    label: str
    found: Measurement

    def figures(self) -> dict[str, object]:
        return {
            "server": self.server,
            "load": self.label,
            "completed": len(self.found.completed),
            "failed": len(self.found.errors),
            "output_throughput": self.found.tokens_per_s,
            **self.found.summary(("ttft", "itl", "e2el"), (90, 99)),
        }


def by_server(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for name, some in groupby(points, key=lambda point: point.server):
        yield name, list(some)
