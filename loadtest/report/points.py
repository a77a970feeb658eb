"""The points of a sweep: one for each server and load, with its measurement."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.loadtest.requests.measurement import Measurement, Metric

GOOD = 0.9  # so many of the requests keep the latencies asked for, where a load is called good
_PASSED = 0.7  # share of the knee's power: beyond such a load no better one is looked for
_GREW = 1.05  # less throughput than that for twice the load means that there is no more


@dataclass(frozen=True, slots=True)
class Point:
    server: str
    label: str
    load: float  # requests at once, or a second
    found: Measurement
    slos_ms: Mapping[Metric, float] = field(default_factory=dict)

    @property
    def power(self) -> float:
        """Return tokens a second divided by the mean latency, Kleinrock's measure of a load.

        Below the most of it more load gains more throughput than it costs latency, above less.
        """
        latencies_ms = self.found.latencies_ms("e2el")
        if not latencies_ms:
            return 0.0
        return self.found.tokens_per_s / (sum(latencies_ms) / len(latencies_ms))

    @property
    def share_good(self) -> float:
        return self.found.num_good(self.slos_ms) / max(1, len(self.found.timelines))

    def figures(self) -> dict[str, object]:
        wrong = self.found.token_errors
        return {
            "server": self.server,
            "load": self.label,
            "completed": len(self.found.completed),
            "failed": len(self.found.errors),
            "request_throughput": len(self.found.completed) / self.found.wall_s,
            "output_throughput": self.found.tokens_per_s,
            "request_goodput": self.found.goodput(self.slos_ms) if self.slos_ms else None,
            "lost_tokens": wrong.lost,
            "repeated_tokens": wrong.repeated,
            "foreign_tokens": wrong.foreign,
            "unproved_streams": wrong.unproved,
            **self.found.summary(("ttft", "itl", "e2el"), (90, 99)),
        }


def by_server(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for name, some in groupby(points, key=lambda point: point.server):
        yield name, list(some)


def knee(points: Sequence[Point]) -> Point:
    """Return the load of one server with the most power."""
    return max(points, key=lambda point: point.power)


def is_past_the_knee(points: Sequence[Point]) -> bool:
    """Return whether the last load of one server, twice the one before, is past its knee."""
    if len(points) < 2:
        return False
    before, last = points[-2:]
    has_grown = last.found.tokens_per_s >= _GREW * before.found.tokens_per_s
    return last.power < _PASSED * knee(points).power or not has_grown


def told_of_loads(points: Sequence[Point], slos_ms: Mapping[Metric, float]) -> Iterator[str]:
    """Yield sentences on the loads of one server, in their order."""
    best = knee(points)
    if best is points[-1] and len(points) > 1:
        yield f"{best.server}: no knee was found up to {best.label}; it stands more load"
    else:
        told = "beyond it latency grows by a larger factor than throughput"
        yield f"{best.server}: the knee is at {best.label}; {told}"
    if slos_ms:
        asked = " ".join(f"{metric}:{most_ms:g}" for metric, most_ms in slos_ms.items())
        good = [point for point in points if point.share_good >= GOOD]
        most = max(good, key=lambda point: point.found.tokens_per_s, default=None)
        at = f"the most load at which {GOOD:.0%} of the requests keep {asked}"
        yield f"{best.server}: {at}: {most.label if most else 'none of these'}"
