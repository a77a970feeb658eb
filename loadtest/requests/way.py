"""The way in which requests are sent, and when each of them is due."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that changes from the first request to the last."""

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def rates(self, progress: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the requests a second at each part of the requests, from 0 to 1."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        factors: NDArray[np.float64] = (self.end_rps / self.start_rps) ** progress
        return self.start_rps * factors


@dataclass(frozen=True, slots=True)
class Way:
    """The way in which requests are sent.

    `burstiness` is the shape of the gamma distribution that the time between arrivals follows: 1
    makes it a Poisson process, less makes bursts.

    In a closed loop, which is `max_concurrency` without a rate, a client asks when its last answer
    has ended, and a request counts from when it is sent. In an open loop each request has a time at
    which it is due, and counts from then, even if the client or `max_concurrency` kept it back: a
    user who comes to a slow server waits too.
    """

    endpoint: Endpoint = "/v1/completions"
    request_rate: float = float("inf")  # a second
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    ramp: Ramp | None = None  # instead of request_rate

    @property
    def is_closed(self) -> bool:
        is_rated = self.ramp is not None or self.request_rate < float("inf")
        return self.max_concurrency is not None and not is_rated


def arrivals_s(count: int, way: Way) -> list[float]:
    """Return the arrival times, in seconds after the first one at zero.

    Over all of them the rate is the one that was asked for.
    """
    if way.ramp is None and way.request_rate == float("inf"):
        return [0.0] * count
    progress = np.arange(1, count) / max(1, count - 1)
    rates = np.full(count - 1, way.request_rate) if way.ramp is None else way.ramp.rates(progress)
    mean_s = 1 / rates
    gaps = np.random.default_rng(way.seed).gamma(way.burstiness, 1 / way.burstiness, count - 1)
    due = np.concatenate([[0.0], np.cumsum(gaps * mean_s)])
    if count > 1:
        due = due / due[-1] * np.cumsum(mean_s)[-1]
    return [float(at_s) for at_s in due]
