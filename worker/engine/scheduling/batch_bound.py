"""Batch throttling: the bound on what the class `batch` adds to the steps of others."""

import time
from collections.abc import Callable

SHARE = 0.25  # share of a one-token step's time, which the class batch may add to any step
_SERVED_S = 10.0  # others are expected back for so long
_KEEP = 0.99  # share of a step's weight that is left after one more step
_FIRST_FIXED_TOKENS = 32.0
_LEAST_VARIANCE = 0.25


class BatchBound:
    """The number of tokens of the class `batch` in a step beside which others are served.

    A step takes about a fixed time and some more for each token. Both follow from the last steps
    by least squares, weighted so that a step counts 1 % less at each one after it. The bound is
    the number of tokens that take a quarter of the fixed time, at least one, and at most twice as
    many as any of the last steps had: what nobody measured is approached by doubling.

    clock  returns seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_s = -_SERVED_S
        self._fixed_tokens = _FIRST_FIXED_TOKENS  # so many take as long as the fixed part
        self._most_tokens = 0.0  # most tokens that one of the last steps had
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Take a step into account."""
        self._most_tokens = max(float(num_tokens), _KEEP * self._most_tokens)
        self._weight = _KEEP * self._weight + 1
        self._tokens = _KEEP * self._tokens + num_tokens
        self._seconds = _KEEP * self._seconds + seconds
        self._squares = _KEEP * self._squares + num_tokens * num_tokens
        self._products = _KEEP * self._products + num_tokens * seconds

    def note_others(self) -> None:
        """Note that sequences of other classes are there now."""
        self._served_s = self._clock()

    @property
    def most_tokens(self) -> int | None:
        """Return the tokens that a step may compute; None while nobody else is served."""
        if self._clock() - self._served_s >= _SERVED_S:
            return None
        if self._weight:
            mean = self._tokens / self._weight
            variance = self._squares / self._weight - mean * mean
            together = self._products / self._weight - mean * self._seconds / self._weight
            if variance > _LEAST_VARIANCE and together > 0:
                slope = together / variance
                fixed_s = self._seconds / self._weight - slope * mean
                self._fixed_tokens = max(fixed_s / slope, 0.0)
        most = min(SHARE * self._fixed_tokens, 2 * self._most_tokens)
        return max(1, int(most))
