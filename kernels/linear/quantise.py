"""Quantization of weights to 8 or 4 bits on a GPU: how they are rounded, kept and read.

Numbers along the inner dimension share a scale in groups, of which the last may be short. A group's
largest number takes the largest of its bits: 127 either way, or -8. `cpu/linear.c` rounds alike, so
a weight stands for the same numbers on both.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.panel_linear import Packing

_ROWS = 1024  # rounded at a time, in float32


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [out_features, in_features].

    numbers      [out_features, in_features] int8; with 4 bits
                 [out_features, groups * group // 2] uint8: the low bits of a byte hold a number
                 of the first half of a group, the high bits one of the second, 8 added to each
    scales       [out_features, groups] bf16
    group        how many numbers share a scale
    """

    numbers: Tensor
    scales: Tensor
    bits: int
    group: int
    in_features: int

    @property
    def out_features(self) -> int:
        return len(self.numbers)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return what rows stand for: [rows, in_features] bf16."""
        numbers, scales = self.numbers[index], self.scales[index]
        if self.bits == 4:
            halves = numbers.view(len(numbers), -1, 1, self.group // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).to(torch.int8) - 8
        grouped = numbers.reshape(*scales.shape, -1)
        spread = grouped.to(torch.bfloat16) * scales[..., None]
        return spread.view(len(scales), -1)[:, : self.in_features]


def quantise(weight: Tensor, packing: Packing) -> QuantisedWeight:
    """Round a weight [out_features, in_features] bf16."""
    group = packing.group or weight.shape[1]
    parts = [_rounded(rows, packing.bits, group) for rows in torch.split(weight, _ROWS)]
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return QuantisedWeight(numbers, scales, packing.bits, group, weight.shape[1])


def _rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    padded = F.pad(weight.float(), (0, -weight.shape[1] % group))
    grouped = padded.view(len(weight), -1, group)
    most = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    scales = (most.abs() / 127 if bits == 8 else most / -8).to(torch.bfloat16)
    exact = (grouped / scales.float()).round().nan_to_num(0.0)
    numbers = exact.masked_fill(scales == 0, 0.0)
    if bits == 8:
        return numbers.clamp(-127, 127).to(torch.int8).flatten(1), scales.squeeze(-1)
    nibbles = (numbers.clamp(-8, 7) + 8).to(torch.uint8)
    low, high = nibbles.chunk(2, -1)
    return (low | high << 4).flatten(1), scales.squeeze(-1)
