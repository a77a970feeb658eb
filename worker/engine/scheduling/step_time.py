"""Chunked prefill in bounded time: how long a step will take, and what of a prompt fits into it."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.worker.engine.sequences.columns import Numbers

LEAST_TOKENS = 16  # tokens of a prompt in a step that has no other; else a full step never ends it
_KEEP = 0.99  # share of a step's weight that is left after one more step
_FIRST = 0.05  # the weight of what was measured at the start
_RIDGE = 1e-6  # share of each sum of squares: what the steps leave open is small
_NUM_TERMS = 3


def num_pairs(starts: Numbers, counts: Numbers) -> float:
    """Return the pairs of a token and one that it attends to, in slices that begin at `starts`."""
    return float(counts @ (starts + (counts + 1) / 2))


class StepRoom:
    """The time that one step has left for prompts, in seconds."""

    def __init__(self, token_s: float, pair_s: float, left_s: float, is_first: bool) -> None:
        self._token_s = token_s
        self._pair_s = pair_s
        self._left_s = left_s
        self._is_first = is_first  # no prompt is in the step so far

    @property
    def is_open(self) -> bool:
        """Return whether a prompt gets a token."""
        return self._is_first or self._left_s > 0

    def take(self, start: int, num_tokens: int) -> int:
        """Return how many of these tokens, from `start` on, are computed: at least one."""
        if self._left_s == math.inf:
            return num_tokens
        least = LEAST_TOKENS if self._is_first else 1
        count = min(num_tokens, max(least, self._fitting(start, num_tokens)))
        self._is_first = False
        spent_s = self._linear_s(start) * count + self._pair_s / 2 * count * count
        self._left_s = self._left_s - spent_s if count == num_tokens else 0.0
        return count

    def _linear_s(self, start: int) -> float:
        return self._token_s + self._pair_s * (start + 0.5)

    def _fitting(self, start: int, num_tokens: int) -> int:
        """Return the tokens, `num_tokens` at most, whose time is left: a root of a parabola."""
        linear_s, left_s = self._linear_s(start), max(self._left_s, 0.0)
        full_s = linear_s * num_tokens + self._pair_s / 2 * num_tokens * num_tokens
        if full_s <= left_s:
            return num_tokens
        root = math.sqrt(linear_s * linear_s + 2 * self._pair_s * left_s)
        return int(2 * left_s / (linear_s + root))


NO_BOUND = StepRoom(0.0, 0.0, math.inf, True)


class StepTime:
    """Predicts how long a step takes, and bounds the prompts in it so that it takes no longer.

    A step takes a fixed time, some for each token, and some for each pair of a token and one that
    it attends to. The three follow from the last steps by least squares of the relative errors,
    weighted so that a step counts 1 % less at each one after it. Relative: a step that a neighbour
    disturbed counts little. Tokens that follow from answers, one of each sequence, are always
    computed.

    most_s   what a step may take, in seconds; None: as long as its tokens take
    timings  steps of one slice each: its tokens, where it starts, and the seconds. They count
             little, but always, so that the last steps need not have had prompts
    """

    def __init__(
        self, most_s: float | None = None, timings: Iterable[tuple[int, int, float]] = ()
    ) -> None:
        self.most_s = most_s
        self._first = np.zeros((_NUM_TERMS, _NUM_TERMS + 1))
        for count, start, seconds in timings:
            pairs = num_pairs(np.array([start]), np.array([count]))
            self._first += _FIRST * _squares(count, pairs, seconds)
        self._sums = np.zeros_like(self._first)
        self._terms: tuple[float, float, float] | None = None

    def note_step(self, num_tokens: int, pairs: float, seconds: float) -> None:
        """Take a step into account."""
        if self.most_s is not None and seconds > 0:
            self._sums = _KEEP * self._sums + _squares(num_tokens, pairs, seconds)
            self._terms = None

    def within(self, starts: Numbers, counts: Numbers) -> Numbers:
        """Return how much of its count each running sequence computes: at least one token."""
        if self.most_s is None or not (counts > 1).any():
            return counts
        counts, limits = np.minimum(counts, 1), counts
        room = self.room(starts, counts)
        for place in np.flatnonzero(limits > 1).tolist():
            counts[place] += room.take(int(starts[place]) + 1, int(limits[place]) - 1)
        return counts

    def room(self, starts: Numbers, counts: Numbers) -> StepRoom:
        """Return the time that a step has left which computes so much of the running sequences."""
        if self.most_s is None:
            return NO_BOUND
        fixed_s, token_s, pair_s = self.terms
        spent_s = fixed_s + token_s * int(counts.sum()) + pair_s * num_pairs(starts, counts)
        return StepRoom(token_s, pair_s, self.most_s - spent_s, not (counts > 1).any())

    @property
    def terms(self) -> tuple[float, float, float]:
        """Return the seconds of a step, of a token and of a pair; all are 0 before any step."""
        if self._terms is None:
            self._terms = _solved(self._first + self._sums)
        return self._terms


def _squares(num_tokens: int, pairs: float, seconds: float) -> NDArray[np.float64]:
    row = np.array([1.0, num_tokens, pairs, seconds]) / seconds
    return np.outer(row[:_NUM_TERMS], row)


def _solved(sums: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the terms of the least squares that are not negative.

    Whichever comes out most negative is left out, until none does.
    """
    matrix, right = sums[:, :_NUM_TERMS], sums[:, _NUM_TERMS]
    scale = np.sqrt(matrix.diagonal())
    places = np.flatnonzero(scale)
    terms = np.zeros(_NUM_TERMS)
    while len(places):
        by = scale[places]
        system = matrix[np.ix_(places, places)] / np.outer(by, by) + _RIDGE * np.eye(len(places))
        solution = np.linalg.solve(system, right[places] / by) / by
        if solution.min() >= 0:
            terms[places] = solution
            break
        places = np.delete(places, (solution * by).argmin())
    fixed_s, token_s, pair_s = terms.tolist()
    return fixed_s, token_s, pair_s
