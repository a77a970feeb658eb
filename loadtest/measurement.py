"""What was measured of one engine on one workload, and the figures that follow from it."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Timeline:
    """One request: when it was handed over, and when each of its tokens came, in seconds."""

    begin_s: float
    num_prompt: int
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.tokens_s[0] - self.begin_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [
            (after - before) * 1e3
            for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)
        ]


@dataclass(frozen=True, slots=True)
class Measurement:
    timelines: list[Timeline]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(timeline.tokens_s) for timeline in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    def ttft_ms(self, percent: float) -> float:
        return float(np.percentile([timeline.ttft_ms for timeline in self.timelines], percent))

    def itl_ms(self, percent: float) -> float:
        """Inter-token latency over all gaps of all requests."""
        gaps = [gap for timeline in self.timelines for gap in timeline.gaps_ms]
        return float(np.percentile(gaps or [0.0], percent))
