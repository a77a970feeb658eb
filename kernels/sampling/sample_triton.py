"""Draws a token from each row of logits on a GPU, in one kernel: the token of `sampling.draw`.

A program takes one row and goes through its logits several times; nothing is sorted. What top_k and
top_p keep is found by bisection over the logits' bits, in at most 32 passes each. Sums of integers
do not depend on their order, and no product is fused with a sum, so the bits are those of a CPU.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LEAST_BLOCK = 128
_NO_TOKEN = tl.constexpr(-1)
# 1.5 * 2 ** 23: added and taken away again, it rounds to whole numbers, halves to even.
_ROUNDER = tl.constexpr(12582912.0)
_LEAST = tl.constexpr(-(2**31) + 1)  # below all keys; one less still is a number


def sample_triton(
    logits: Tensor,
    scales: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    least_powers: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Return a token for each row [rows] int64; NO_TOKEN where the largest logit is not finite.

    logits        [rows, vocab]  float32, contiguous
    scales        [rows]         float32; log2(e) over the temperature, or 0 for the likeliest token
    top_ks        [rows]         int32; the size of the vocabulary keeps all
    top_ps        [rows]         float64; 1 keeps all
    least_powers  [rows]         float32; log2(min_p), minus infinity keeps all
    uniforms      [rows]         float64 in [0, 1)
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, max(_LEAST_BLOCK, triton.next_power_of_2(vocab)))
    _sample[(rows,)](
        logits,
        scales,
        top_ks,
        top_ps,
        least_powers,
        uniforms,
        tokens,
        vocab,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return tokens


@triton.jit
def _sample(
    logits_ptr,
    scales_ptr,
    top_ks_ptr,
    top_ps_ptr,
    least_powers_ptr,
    uniforms_ptr,
    tokens_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * vocab
    scale = tl.load(scales_ptr + row)
    top, token, is_finite = _likeliest(logits, vocab, BLOCK)
    if is_finite & (scale > 0):
        top_k = tl.load(top_ks_ptr + row)
        top_p = tl.load(top_ps_ptr + row)
        least_power = tl.load(least_powers_ptr + row)
        uniform = tl.load(uniforms_ptr + row)
        least = tl.full([], _LEAST, tl.int32)
        if top_k < vocab:
            least = _kth(logits, vocab, top_k, _key(top), BLOCK)
        total = _mass(logits, vocab, top, scale, least_power, least, least - 1, BLOCK)
        if top_p < 1.0:
            nucleus_mass = top_p * total.to(tl.float64)
            low, high = least, _key(top)
            while low < high:  # the smallest key above which less than `nucleus_mass` weighs
                middle = _between(low, high)
                above = _mass(logits, vocab, top, scale, least_power, least, middle, BLOCK)
                if above.to(tl.float64) < nucleus_mass:
                    high = middle
                else:
                    low = middle + 1
            least = high
            total = _mass(logits, vocab, top, scale, least_power, least, least - 1, BLOCK)
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _at(logits, vocab, top, scale, least_power, least, target, BLOCK)
    tl.store(tokens_ptr + row, tl.where(is_finite, token, _NO_TOKEN).to(tl.int64))


@triton.jit
def _likeliest(logits, vocab, BLOCK: tl.constexpr):
    """Return the largest logit, its first place, and whether it is finite and none is NaN."""
    top = tl.full([], -float("inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(logits + place, mask=place < vocab, other=-float("inf"))
        is_nan = x != x
        num_nan += tl.sum(is_nan.to(tl.int32), 0)
        x = tl.where(is_nan, -float("inf"), x)
        most = tl.max(x, 0)
        if most > top:
            token = tl.min(tl.where(x == most, place, vocab), 0)
            top = most
    return top, token, (num_nan == 0) & (top > -float("inf")) & (top < float("inf"))


@triton.jit
def _key(x):
    """Return integers in the order of the numbers; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _between(low, high):
    """Return the middle, rounded down, of numbers whose sum may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kth(logits, vocab, top_k, high, BLOCK: tl.constexpr):
    """Return the key of the k-th largest logit: the smallest above which fewer than k lie."""
    low = tl.full([], _LEAST, tl.int32)
    while low < high:
        middle = _between(low, high)
        count = tl.zeros([], tl.int32)
        for start in range(0, vocab, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < vocab
            x = tl.load(logits + place, mask=inside, other=0.0)
            count += tl.sum((inside & (_key(x) > middle)).to(tl.int32), 0)
        if count < top_k:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _weights(x, inside, top, scale, least_power, least, above):
    """Return the weights, int64, of logits that are kept and whose key is larger than `above`."""
    power = (x - top) * scale
    key = _key(x)
    is_kept = inside & (power >= least_power) & (key >= least) & (key > above)
    power = tl.maximum(power, -60.0)
    whole = (power + _ROUNDER) - _ROUNDER
    rest = power - whole
    sums = rest * 1.32647273e-3 + 9.67151299e-3
    sums = sums * rest + 5.55073358e-2
    sums = sums * rest + 2.40222424e-1
    sums = sums * rest + 6.93147004e-1
    sums = sums * rest + 1.0
    units = (sums * 1073741824.0).to(tl.int64) << 10
    return tl.where(is_kept, units >> (-whole).to(tl.int64), 0)


@triton.jit
def _mass(logits, vocab, top, scale, least_power, least, above, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocab
        x = tl.load(logits + place, mask=inside, other=0.0)
        total += tl.sum(_weights(x, inside, top, scale, least_power, least, above), 0)
    return total


@triton.jit
def _at(logits, vocab, top, scale, least_power, least, target, BLOCK: tl.constexpr):
    """Return the first token up to which more than `target` weighs, in the order of ids."""
    before = tl.zeros([], tl.int64)
    token = tl.full([], vocab - 1, tl.int32)
    for start in range(0, vocab, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocab
        x = tl.load(logits + place, mask=inside, other=0.0)
        weights = _weights(x, inside, top, scale, least_power, least, least - 1)
        here = tl.sum(weights, 0)
        if (before <= target) & (target < before + here):
            ends = before + tl.cumsum(weights, 0)
            token = start + tl.sum((ends <= target).to(tl.int32), 0)
        before += here
    return token
