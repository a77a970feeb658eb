"""Quantization of dense weights to 8 or 4 bits, as a GPU keeps them.

A group's largest number takes the largest of its bits: 127 either way, or -8. `cpu/linear.c` rounds
alike, so a weight stands for the same numbers on both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.panel_weight import Packing
from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.fp8 import FP8, quantise_rows_ref

_ROWS = 1024  # rounded at a time, in float32


def quantise(weight: Tensor, packing: Packing) -> Weight:
    """Round a weight [out_features, in_features] bf16."""
    group = packing.group or weight.shape[1]
    parts = [_rounded(rows, packing.bits, group) for rows in torch.split(weight, _ROWS)]
    numbers, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return Weight(numbers, scales, group, weight.shape[1])


def quantise_fp8(weight: Tensor) -> Weight:
    """Round a weight [out_features, in_features] to fp8, with a scale for each row."""
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device).view(FP8)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    pieces = (torch.split(tensor, _ROWS) for tensor in (weight, numbers, scales))
    for rows, to_numbers, to_scales in zip(*pieces, strict=True):
        row_numbers, row_scales = quantise_rows_ref(rows)
        to_numbers.copy_(row_numbers)
        to_scales.copy_(row_scales)
    return Weight(numbers, scales, weight.shape[1], weight.shape[1])


def _rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    rows = F.pad(weight.float(), (0, -weight.shape[1] % group))
    groups = rows.view(len(weight), -1, group)
    most = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (most.abs() / 127 if bits == 8 else most / -8).to(torch.bfloat16)
    exact = (groups / scales.float()).round().nan_to_num(0.0)
    numbers = exact.masked_fill(scales == 0, 0.0)
    if bits == 8:
        return numbers.clamp(-127, 127).to(torch.int8).flatten(1), scales.squeeze(-1)
    nibbles = (numbers.clamp(-8, 7) + 8).to(torch.uint8)
    low, high = nibbles.chunk(2, -1)
    return (low | high << 4).flatten(1), scales.squeeze(-1)
