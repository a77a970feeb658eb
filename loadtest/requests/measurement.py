"""The measurement of one engine on one workload, and its figures: TTFT, TPOT, ITL, goodput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from penstock.loadtest.requests.tokens import SeenPiece, TokenErrors

Metric = Literal["ttft", "tpot", "itl", "e2el"]


@dataclass(slots=True)
class Timeline:
    """The times of one request, in seconds: when it was due, and when each token came.

    For a stream the times are those of pieces with text, and the server counts the tokens.

    begin_s  when the request was due; in a closed loop, and in process, when it was handed over
    sent_s   when it was sent, where that may be later
    job_id   the server's name of the answer; of Penstock the job's id
    pieces   the events of a stream, to be held against the job's log
    """

    begin_s: float
    num_prompt: int
    tokens_s: list[float] = field(default_factory=list)
    num_counted: int | None = None
    end_s: float | None = None
    error: str = ""
    sent_s: float | None = None
    job_id: str = ""
    trace_id: str = ""
    finish_reason: str | None = None
    pieces: list[SeenPiece] = field(default_factory=list)
    token_errors: TokenErrors = field(default_factory=TokenErrors)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_s) if self.num_counted is None else self.num_counted

    @property
    def ttft_ms(self) -> float:
        """Return the time to the first token."""
        return (self.tokens_s[0] - self.begin_s) * 1e3

    @property
    def e2el_ms(self) -> float:
        """Return the time to the end."""
        return ((self.end_s or self.tokens_s[-1]) - self.begin_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Return the mean time of each token after the first."""
        return (self.e2el_ms - self.ttft_ms) / (self.num_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in pairwise(self.tokens_s)]

    @property
    def late_ms(self) -> float:
        """Return how long after its time the client sent the request."""
        return 0.0 if self.sent_s is None else max(0.0, self.sent_s - self.begin_s) * 1e3

    def meets(self, slos_ms: Mapping[Metric, float]) -> bool:
        """Return whether the request kept all of these latencies. One that failed kept none."""
        if self.error or not self.tokens_s:
            return False
        latencies: dict[Metric, float] = {"ttft": self.ttft_ms, "e2el": self.e2el_ms}
        latencies["tpot"] = self.tpot_ms if self.num_tokens > 1 else 0.0
        latencies["itl"] = max(self.gaps_ms, default=0.0)
        return all(latencies[metric] <= most_ms for metric, most_ms in slos_ms.items())


class Depth(NamedTuple):
    """The requests that a server held at one moment."""

    at_s: float
    num_waiting: float
    num_running: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured requests. Of one that failed, nothing counts but the failure."""

    timelines: list[Timeline]
    wall_s: float
    cpu_s: float = 0.0
    start_s: float = 0.0  # from the start of the engine's process to its first token
    begin_s: float = 0.0  # by the clock of the timelines
    depths: list[Depth] = field(default_factory=list)

    def __add__(self, addend: "Measurement") -> "Measurement":
        """Return what both measured, one after the other."""
        return replace(
            self,
            timelines=self.timelines + addend.timelines,
            wall_s=self.wall_s + addend.wall_s,
            cpu_s=self.cpu_s + addend.cpu_s,
            depths=self.depths + addend.depths,
        )

    @property
    def completed(self) -> list[Timeline]:
        return [timeline for timeline in self.timelines if not timeline.error]

    @property
    def errors(self) -> list[str]:
        return [timeline.error for timeline in self.timelines if timeline.error]

    @property
    def num_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.completed)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(timeline.num_prompt for timeline in self.completed)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def token_errors(self) -> TokenErrors:
        return sum((timeline.token_errors for timeline in self.timelines), TokenErrors())

    def num_good(self, slos_ms: Mapping[Metric, float]) -> int:
        """Return how many requests kept all of these latencies."""
        return sum(timeline.meets(slos_ms) for timeline in self.timelines)

    def goodput(self, slos_ms: Mapping[Metric, float]) -> float:
        """Return the requests a second that kept all of these latencies."""
        return self.num_good(slos_ms) / self.wall_s

    def late_ms(self, percent: float) -> float:
        """Return a percentile of how long after its time the client sent a request."""
        return float(
            np.percentile([timeline.late_ms for timeline in self.timelines] or [0.0], percent)
        )

    def ttft_ms(self, percent: float) -> float:
        return self.percentile("ttft", percent)

    def itl_ms(self, percent: float) -> float:
        """Return a percentile of the inter-token latency, over all gaps of all requests."""
        return self.percentile("itl", percent)

    def percentile(self, metric: Metric, percent: float) -> float:
        return float(np.percentile(self.latencies_ms(metric) or [0.0], percent))

    def latencies_ms(self, metric: Metric) -> list[float]:
        timelines = [timeline for timeline in self.completed if timeline.tokens_s]
        if metric == "ttft":
            return [timeline.ttft_ms for timeline in timelines]
        if metric == "tpot":
            return [timeline.tpot_ms for timeline in timelines if timeline.num_tokens > 1]
        if metric == "itl":
            return [gap for timeline in timelines for gap in timeline.gaps_ms]
        return [timeline.e2el_ms for timeline in timelines]

    def summary(self, metrics: Sequence[Metric], percentiles: Sequence[float]) -> dict[str, float]:
        """Return the figures of the metrics by vLLM's names."""
        figures: dict[str, float] = {}
        for metric in metrics:
            latencies = self.latencies_ms(metric) or [0.0]
            figures[f"mean_{metric}_ms"] = float(np.mean(latencies))
            figures[f"median_{metric}_ms"] = float(np.median(latencies))
            figures[f"std_{metric}_ms"] = float(np.std(latencies))
            for percent in percentiles:
                figures[f"p{percent:g}_{metric}_ms"] = float(np.percentile(latencies, percent))
        return figures
