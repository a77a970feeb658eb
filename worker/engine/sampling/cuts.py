"""The rules that exclude unlikely tokens, for rows that ask for one which the kernels lack.

In order: top_n_sigma; min_p, top_k and top_p; top_a; typical_p; XTC. Each rule sees what those
before it keep, at the row's temperature. Sources: Tang et al., "Top-n-sigma", 2024; KoboldAI for
top_a; Meister et al., "Locally typical sampling", 2023; llama.cpp for XTC, "exclude top choices".

Sums are of the draw's integer weights, so a row's tokens depend on nothing but the row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.numbers.transfers import send
from penstock.kernels.sampling.draw import BLOCK, UNIT, Cut, least_kept, powers_of, weights_of
from penstock.kernels.sampling.philox import key_schedule, uniforms
from penstock.schemas.params.sampling import SamplingParams

_XTC_STREAM = 1 << 20  # added to a choice: its other random numbers
_DIGITS = (24, 16, 8, 0)  # shifts of the bytes of a float32, the most significant first


def asks_for_cuts(params: SamplingParams) -> bool:
    return (
        params.top_n_sigma > 0
        or params.top_a > 0
        or params.typical_p < 1
        or params.xtc_probability > 0
    )


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row that asks for these rules.

    place  its place in the logits
    """

    place: int
    params: SamplingParams
    seed: int
    choice: int


class Cuts:
    """The rules of some rows of a batch."""

    def __init__(self, rows: list[CutRow], vocab_size: int, device: torch.device) -> None:
        rules = [row.params for row in rows]
        self.places = [row.place for row in rows]
        top_ks = [_num_kept(rule.top_k, vocab_size) for rule in rules]
        numbers = [
            (
                rule.top_p,
                rule.min_p,
                rule.top_n_sigma,
                rule.top_a,
                rule.typical_p,
                rule.xtc_threshold,
            )
            for rule in rules
        ]
        columns: list[NDArray[np.generic]] = [
            np.array(self.places, np.int64),
            np.array([rule.temperature for rule in rules], np.float32),
            np.array(top_ks, np.int64),
            np.array(numbers, np.float64).T,
        ]
        self._index, self._temperature, most, floats = send(columns, device)
        top_ps, min_ps, self._sigmas, self._top_as, self._typical, self._likely = floats
        self._cut = Cut(most, top_ps, min_ps)
        self._xtc = np.array([rule.xtc_probability for rule in rules])
        self._keys = key_schedule([row.seed for row in rows])
        self._choices = [row.choice + _XTC_STREAM for row in rows]
        self._rows_a_block = max(1, BLOCK // vocab_size)

    def exclude(self, logits: Tensor, positions: NDArray[np.int64]) -> None:
        """Set the logits [rows, vocab] of excluded tokens to minus infinity, in place.

        positions  [rows]  the place of each row's next token in its completion
        """
        draws = uniforms(self._keys, self._choices, positions[self.places].tolist())
        (fires,) = send([draws < self._xtc], logits.device)
        for begin in range(0, len(self.places), self._rows_a_block):
            rows = slice(begin, begin + self._rows_a_block)
            index = self._index[rows]
            logits[index] = self._kept(logits[index], rows, fires[rows])

    def _kept(self, logits: Tensor, rows: slice, fires: Tensor) -> Tensor:
        temperature = self._temperature[rows]
        logits = _without(logits, below_sigmas(logits, self._sigmas[rows]))
        least = least_kept(logits, temperature, self._cut.rows(rows))
        logits = _without(logits, logits < least[:, None])
        weights = weights_of(logits, temperature)
        logits = _without(logits, below_top_a(weights, self._top_as[rows]))
        logits = _without(logits, untypical(logits, temperature, self._typical[rows]))
        weights = weights_of(logits, temperature)
        top = top_choices(logits, weights, self._likely[rows])
        return _without(logits, top & fires[:, None])


def below_sigmas(logits: Tensor, sigmas: Tensor) -> Tensor:
    """Return which logits are more than so many standard deviations below the largest."""
    finite = logits.isfinite()
    counts = finite.sum(-1, keepdim=True)
    # In units of 2**-20, as integers, whose sums have no order.
    units = (logits.double().where(finite, 0) * 2**20).long()
    mean = units.sum(-1, keepdim=True).double() / counts
    off = ((units - mean) / 2**20).where(finite, 0)
    deviation = ((off.square() * 2**20).long().sum(-1, keepdim=True) / counts / 2**20).sqrt()
    least = logits.amax(-1, keepdim=True) - sigmas[:, None] * deviation
    return (logits < least) & (sigmas > 0)[:, None]


def below_top_a(weights: Tensor, top_as: Tensor) -> Tensor:
    """Return which tokens are below `top_as` times the square of the largest probability."""
    total = weights.sum(-1, keepdim=True)
    return weights < top_as[:, None] * UNIT**2 / total


def untypical(logits: Tensor, temperature: Tensor, masses: Tensor) -> Tensor:
    """Return which tokens are not among those with a surprise nearest to the row's entropy.

    As many are kept as have a probability of `masses` together. The difference of a token's
    surprise from the entropy is that of its log probability from their mean.
    """
    powers = powers_of(logits, temperature)
    weights = weights_of(logits, temperature)
    total = weights.sum(-1, keepdim=True)
    products = (weights * powers.clamp(min=-60).double()).long()
    mean = products.sum(-1, keepdim=True).double() / total
    off = (powers.double() - mean).abs().float()
    bits = off.view(torch.int32)  # floats that are not negative have the order of their bits
    # The smallest difference at which the mass is reached, byte by byte.
    mass, weights = masses[:, None] * total, weights.clone()
    limit = torch.zeros_like(total)
    for shift in _DIGITS:
        digits = ((bits >> shift) & 255).long()
        sums = torch.zeros(len(logits), 256, dtype=torch.int64, device=logits.device)
        sums.scatter_add_(1, digits, weights)
        ends = sums.cumsum(-1)
        digit = (ends < mass).sum(-1, keepdim=True).clamp(max=255)
        mass = mass - (ends - sums).gather(1, digit)
        weights *= digits == digit
        limit = limit << 8 | digit
    return (bits > limit) & (masses < 1)[:, None]


def top_choices(logits: Tensor, weights: Tensor, likely: Tensor) -> Tensor:
    """Return the tokens with a probability of at least `likely`, but for the least of them."""
    likely = likely[:, None] * weights.sum(-1, keepdim=True)
    least = logits.masked_fill((weights < likely) | (weights == 0), torch.inf).amin(-1)
    return logits > least[:, None]


def _num_kept(top_k: int, vocab_size: int) -> int:
    """Return a bounded top_k: a caller's may be larger than any tensor holds."""
    return min(top_k, vocab_size) if top_k > 0 else vocab_size


def _without(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(mask, -torch.inf)
