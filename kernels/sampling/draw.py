"""Draws one token from each row of logits: the likeliest, or by inverse distribution function.

    logits       [rows, vocab]  float32
    temperature  [rows]         float32, above 0
    uniforms     [rows]         float64 in [0, 1)
    returns      [rows]         int64

A token's weight is its unnormalised probability in units of 2**-40 of the row's likeliest token,
cut to an integer. Sums of integers do not depend on their order, and a weight is made of float32
sums and products alone, which every machine rounds alike (libraries' exponentials differ). So a
row's token depends on nothing but the row: not on the batch, not on the way its candidates were
found, not on the processor. Tokens are laid out in order of their ids; of equal logits either all
are kept or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.numbers.device import on_gpu

UNIT = 2.0**40
WIDTHS = (64, 256, 4096)  # how many of the likeliest tokens to look at; few rows need the last
BLOCK = 2**22  # logits whose weights are held at once on a GPU: 32 MiB
CPU_BLOCK = 2**19  # logits; about the size of a core's cache
LOG2_E = 1.44269504
STEEPEST = 3e38  # the largest scale; an infinite one would give NaN
# 2**x for x in [-0.5, 0.5], within 2e-7: a minimax polynomial, highest power first. Its last
# coefficient is 1, and is not listed.
POWERS = (1.32647273e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1)


@dataclass(frozen=True, slots=True)
class Cut:
    """The parameters that exclude unlikely tokens, row by row: [rows] each.

    top_k   int64    keep the k likeliest; the size of the vocabulary keeps all
    top_p   float64  keep the likeliest until together they reach the probability p
    min_p   float64  keep tokens at least p times as likely as the likeliest

    They apply in vLLM's order: min_p, then top_k, then top_p among the tokens that these keep.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor | slice) -> "Cut":
        return Cut(self.top_k[index], self.top_p[index], self.min_p[index])


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit and its id, the first of equal ones. NaN is the largest."""
    rows, vocab = logits.shape
    size = chunk_size(vocab)
    chunks = logits.view(rows, -1, size)  # amax without an index is ten times faster
    tops = chunks.amax(-1)
    top, chunk = tops.max(-1)
    inner = chunks[torch.arange(rows, device=logits.device), chunk].argmax(-1)
    return top, chunk * size + inner


def draw(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the whole vocabulary."""
    blocks = _blocks(logits, temperature, uniforms)
    return torch.cat([_draw_block(*block) for block in blocks])


def draw_cut(logits: Tensor, temperature: Tensor, cut: Cut, uniforms: Tensor) -> Tensor:
    """Draw from the tokens that `cut` keeps.

    Each row looks at its likeliest few, and at more only where these do not decide.
    """
    tokens = torch.empty_like(cut.top_k)
    for rows, candidates, weights in _cut_rows(logits, temperature, cut):
        ids, order = candidates.ids.sort(-1)
        places = _pick(weights.gather(1, order), uniforms[rows])
        tokens[rows] = ids.gather(1, places[:, None])[:, 0]
    return tokens


def least_kept(logits: Tensor, temperature: Tensor, cut: Cut) -> Tensor:
    """Return the smallest logit of each row that `cut` keeps [rows]."""
    least = torch.empty_like(temperature)
    for rows, candidates, weights in _cut_rows(logits, temperature, cut):
        least[rows] = candidates.logits.masked_fill(weights == 0, torch.inf).amin(-1)
    return least


def _cut_rows(
    logits: Tensor, temperature: Tensor, cut: Cut
) -> Iterator[tuple[Tensor, "_Few", Tensor]]:
    """Yield rows with their likeliest tokens and the weights of these, 0 for what `cut` excludes.

    A row comes again, with more tokens, until `cut` keeps none outside of them.
    """
    vocab = logits.shape[1]
    nucleus = ((cut.top_k >= vocab) & (cut.min_p == 0)).nonzero()[:, 0]
    masses = torch.zeros_like(cut.top_k)
    masses[nucleus] = mass(_rows(logits, nucleus), temperature[nucleus])
    rows = torch.arange(len(logits), device=logits.device)
    for width in [*(width for width in WIDTHS if width < vocab), vocab]:
        candidates = _likeliest_few(_rows(logits, rows), width)
        weights, is_final = _cut_few(candidates, temperature[rows], cut.rows(rows), masses[rows])
        yield rows, candidates, weights
        rows = rows[~is_final]
        if width == vocab or not len(rows):
            return


def mass(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the sum of each row's weights [rows], int64; the likeliest token weighs 2**40."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return torch.cat([weights_of(*block).sum(-1) for block in _blocks(logits, temperature)])


def chunk_size(vocab: int, limit: int = 512) -> int:
    """Return the largest divisor of the vocabulary's size up to the limit."""
    return next(size for size in range(min(limit, vocab), 0, -1) if vocab % size == 0)


@dataclass(frozen=True, slots=True)
class _Few:
    """Each row's likeliest tokens [rows, width], likeliest first."""

    logits: Tensor
    ids: Tensor
    is_all: bool


def _likeliest_few(logits: Tensor, width: int) -> _Few:
    values, ids = logits.topk(width)
    return _Few(values, ids, width == logits.shape[1])


def _cut_few(
    candidates: _Few, temperature: Tensor, cut: Cut, masses: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of `candidates` [rows, width], 0 where excluded, and which rows are final.

    A row is final where `cut` keeps no token outside `candidates`.

    masses  [rows]  the mass of the whole vocabulary where top_p alone cuts, else 0
    """
    width = candidates.ids.shape[1]
    powers = powers_of(candidates.logits, temperature)
    weights = _exponentials(powers)
    kth = candidates.logits.gather(1, (cut.top_k.clamp(max=width) - 1)[:, None])
    weights *= (candidates.logits >= kth) & (powers >= cut.min_p.log2().float()[:, None])
    is_total_known = (weights[:, -1] == 0) | (masses > 0)
    total = torch.where(masses > 0, masses, weights.sum(-1))
    likelier = weights.cumsum(-1) - weights
    inside = likelier < (cut.top_p * total)[:, None]
    last = candidates.logits.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    weights *= candidates.logits >= last
    return weights, (is_total_known & (weights[:, -1] == 0)) | candidates.is_all


def _draw_block(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from whole rows: find the chunk that holds the place, then the token in it."""
    rows, vocab = logits.shape
    size = chunk_size(vocab)
    weights = weights_of(logits, temperature).view(rows, -1, size)
    sums = weights.sum(-1)
    ends = sums.cumsum(-1)
    target = _target(ends[:, -1], uniforms)
    chunk = _first_above(ends, target)
    here = torch.arange(rows, device=logits.device)
    target -= (ends - sums)[here, chunk]
    return chunk * size + _first_above(weights[here, chunk].cumsum(-1), target)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    ends = weights.cumsum(-1)
    return _first_above(ends, _target(ends[:, -1], uniforms))


def _target(total: Tensor, uniforms: Tensor) -> Tensor:
    """Return the place of each draw: at least 0, below the total."""
    return torch.minimum((uniforms * total).long(), total - 1)


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Return where each rising row first exceeds its target.

    Where it never does (NaN), that is the last place.
    """
    return (ends <= target[:, None]).sum(-1).clamp(max=ends.shape[1] - 1)


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the tokens' weights, int64: 2**40 for each row's likeliest, less for the others."""
    return _exponentials(powers_of(logits, temperature))


def powers_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return each token's probability relative to the row's likeliest, as a power of 2.

    The powers never fall as logits rise.
    """
    scale = torch.full_like(temperature, LOG2_E).div_(temperature).clamp_(max=STEEPEST)
    return (logits - logits.amax(-1, keepdim=True)).mul_(scale[:, None])


def _exponentials(powers: Tensor) -> Tensor:
    powers = powers.clamp(min=-60)
    whole = powers.round()
    rest = powers.sub_(whole)
    sums = torch.full_like(rest, POWERS[0])
    for factor in (*POWERS[1:], 1.0):
        sums.mul_(rest).add_(factor)
    units = sums.mul_(2.0**30).long() << 10
    return units >> whole.neg_().long()


def _blocks(logits: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield groups of rows, so that memory is bounded."""
    rows, vocab = logits.shape
    count = max(1, (BLOCK if on_gpu(logits) else CPU_BLOCK) // vocab)
    for start in range(0, rows, count):
        yield tuple(column[start : start + count] for column in (logits, *columns))


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    """Return those rows; without a copy when they are all rows, in order."""
    return logits if len(index) == len(logits) else logits[index]
