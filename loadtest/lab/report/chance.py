"""Tells how much of a difference between two measurements is chance."""

import numpy as np

from penstock.loadtest.requests.measurement import Measurement

_DRAWS = 2000


def ttft_ratio_range(
    alone: Measurement, beside: Measurement, percent: float
) -> tuple[float, float]:
    """Return where the ratio of a percentile of TTFT lies, 95 %, had others of these requests come.

    It is the percentile bootstrap: B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993.
    """
    draw = np.random.default_rng(0)
    draws = [
        np.percentile(
            draw.choice(side.latencies_ms("ttft") or [1.0], (_DRAWS, len(side.completed) or 1)),
            percent,
            axis=1,
        )
        for side in (alone, beside)
    ]
    low, high = np.percentile(draws[1] / draws[0], (2.5, 97.5))
    return float(low), float(high)
