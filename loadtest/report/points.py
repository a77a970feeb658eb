"""The points of a sweep: one for each server and load, with its measurement."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.loadtest.requests.measurement import Measurement, Metric

GOOD = 0.9  # so many of the requests keep the latencies asked for, where a load is called good
_PAST_SHARE = 0.7  # share of the knee's power: beyond such a load no better one is looked for
_GROWTH = 1.05  # less throughput than that for twice the load means that there is no more


@dataclass(frozen=True, slots=True)
class Point:
    server: str
    label: str
    load: float  # requests at once, or a second
    measurement: Measurement
    slos_ms: Mapping[Metric, float] = field(default_factory=dict)

    @property
    def power(self) -> float:
        """Return tokens a second divided by the mean latency, Kleinrock's measure of a load.

        Below the most of it more load gains more throughput than it costs latency, above less.
        """
        latencies_ms = self.measurement.latencies_ms("e2el")
        if not latencies_ms:
            return 0.0
        return self.measurement.tokens_per_s / (sum(latencies_ms) / len(latencies_ms))

    @property
    def share_good(self) -> float:
        return self.measurement.num_good(self.slos_ms) / max(1, len(self.measurement.timelines))

    def figures(self) -> dict[str, object]:
        wrong = self.measurement.token_errors
        return {
            "server": self.server,
            "load": self.label,
            "completed": len(self.measurement.completed),
            "failed": len(self.measurement.errors),
            "request_throughput": len(self.measurement.completed) / self.measurement.wall_s,
            "output_throughput": self.measurement.tokens_per_s,
            "request_goodput": self.measurement.goodput(self.slos_ms) if self.slos_ms else None,
            "lost_tokens": wrong.num_lost,
            "repeated_tokens": wrong.num_repeated,
            "foreign_tokens": wrong.num_foreign,
            "unproved_streams": wrong.num_unproved,
            **self.measurement.summary(("ttft", "itl", "e2el"), (90, 99)),
        }


def by_server(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for name, group in groupby(points, key=lambda point: point.server):
        yield name, list(group)


def knee(points: Sequence[Point]) -> Point:
    """Return the load of one server with the most power."""
    return max(points, key=lambda point: point.power)


def is_past_the_knee(points: Sequence[Point]) -> bool:
    """Return whether the last load of one server, twice the one before, is past its knee."""
    if len(points) < 2:
        return False
    before, last = points[-2:]
    has_grown = last.measurement.tokens_per_s >= _GROWTH * before.measurement.tokens_per_s
    return last.power < _PAST_SHARE * knee(points).power or not has_grown


def told_of_loads(points: Sequence[Point], slos_ms: Mapping[Metric, float]) -> Iterator[str]:
    """Yield sentences on the loads of one server, in their order."""
    best = knee(points)
    if best is points[-1] and len(points) > 1:
        yield f"{best.server}: no knee was found up to {best.label}; it stands more load"
    else:
        reason = "beyond it latency grows by a larger factor than throughput"
        yield f"{best.server}: the knee is at {best.label}; {reason}"
    if slos_ms:
        goals = " ".join(f"{metric}:{most_ms:g}" for metric, most_ms in slos_ms.items())
        good = [point for point in points if point.share_good >= GOOD]
        most = max(good, key=lambda point: point.measurement.tokens_per_s, default=None)
        at = f"the most load at which {GOOD:.0%} of the requests keep {goals}"
        yield f"{best.server}: {at}: {most.label if most else 'none of these'}"
