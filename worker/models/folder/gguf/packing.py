"""Blocks of a GGUF tensor as numbers of 4 or 8 bits, each group of them with a scale.

Nothing is rounded: `Weight.rows` gives what the package gguf makes of the same bytes, to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from penstock.worker.layers.linear import Weight, joined

_PIECE_BYTES = 2**25  # how many bytes of blocks are unpacked at a time


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of blocks: [blocks, numbers in a block], and scales and mins [blocks, groups].

    numbers  uint8 of 4 bits, and int8
    """

    numbers: Tensor
    scales: Tensor
    mins: Tensor | None = None


def packed_weight(rows: Tensor, kind: GGMLQuantizationType) -> Weight | None:
    """Return rows of blocks, [rows, bytes], as a weight; None for a kind that is only widened."""
    unpack, block_bytes = _UNPACKERS.get(kind), GGML_QUANT_SIZES[kind][1]
    if unpack is None:
        return None
    step = max(1, _PIECE_BYTES // rows.shape[1])
    pieces = (rows[begin : begin + step].contiguous() for begin in range(0, len(rows), step))
    return joined([_weight(unpack(piece.view(-1, block_bytes)), len(piece)) for piece in pieces])


def one_below_the_other(weights: Sequence[Weight]) -> Weight:
    """Return weights as one. Where they are of several kinds, all are made numbers of 8 bits."""
    whole = joined(weights)
    if whole is not None:
        return whole
    group, has_mins = (
        min(weight.group for weight in weights),
        any(weight.mins is not None for weight in weights),
    )
    whole = joined([_in_bytes(weight, group, has_mins) for weight in weights])
    assert whole is not None, "weights of one kind are joined"
    return whole


def _weight(content: _Numbers, num_rows: int) -> Weight:
    numbers, scales = content.numbers.view(num_rows, -1), content.scales.view(num_rows, -1)
    mins = None if content.mins is None else content.mins.view(num_rows, -1)
    columns = numbers.shape[1]
    group = columns // scales.shape[1]
    if numbers.dtype == torch.uint8:
        return Weight.of_nibbles(numbers, scales, group, mins)
    return Weight(numbers, scales, group, columns, mins)


def _in_bytes(weight: Weight, group: int, has_mins: bool) -> Weight:
    """Return a weight with numbers of 8 bits, in groups of a size that divides its own."""
    numbers, scales, mins = weight.numbers, weight.scales, weight.mins
    assert scales is not None, "a packed weight has scales"
    if weight.bits == 4:
        halves = numbers.view(len(numbers), -1, 1, weight.group // 2)
        numbers = torch.cat((halves & 15, halves >> 4), 2).view(len(numbers), -1).to(torch.int8)
        numbers = numbers if mins is not None else numbers - 8
    times = weight.group // group
    if mins is None and has_mins:
        mins = torch.zeros_like(scales)
    return replace(
        weight,
        numbers=numbers,
        scales=scales.repeat_interleave(times, 1),
        group=group,
        mins=None if mins is None else mins.repeat_interleave(times, 1),
    )


def _q4_0(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Numbers:
    numbers = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _Numbers(numbers.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Numbers:
    numbers = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _Numbers(numbers.to(torch.int8), _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Numbers:
    return _Numbers(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q4_k(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[:, 16:], 32), *_scales_and_mins(blocks))


def _q5_k(blocks: Tensor) -> _Numbers:
    high = blocks[:, 16:48, None].transpose(1, 2) >> torch.arange(8, dtype=torch.uint8)[:, None]
    numbers = _nibbles(blocks[:, 48:], 32) | (high & 1).flatten(1) << 4
    return _Numbers(numbers.to(torch.int8), *_scales_and_mins(blocks))


def _q6_k(blocks: Tensor) -> _Numbers:
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor(
        [[0], [2], [4], [6]], dtype=torch.uint8
    )
    numbers = _nibbles(blocks[:, :128], 64) | (pairs & 3).flatten(1) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _Numbers(numbers.to(torch.int8) - 32, _half(blocks, 208) * scales)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the number of 16 bits at a byte of each block, [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, width: int) -> Tensor:
    """Return numbers of 4 bits: the low ones of `width` bytes, then their high ones, and so on."""
    halves = data.reshape(len(data), -1, 1, width)
    return torch.cat((halves & 15, halves >> 4), 2).flatten(1)


def _bits(data: Tensor) -> Tensor:
    """Return the bits of each byte, the lowest first."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return both for the 8 groups of Q4_K's and Q5_K's blocks, each of 6 bits in 12 bytes."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), 1)
    mins = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * mins.float()


_UNPACKERS: dict[GGMLQuantizationType, Callable[[Tensor], _Numbers]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
