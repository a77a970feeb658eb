"""A weight as a device keeps it: dense, or as numbers of 8 or 4 bits with scales.

Numbers along the inner dimension share a scale in groups, of which the last may be short.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.numbers.fp8 import FP8


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight [out_features, in_features], or a stack of several of one shape.

    numbers  [.., out_features, in_features] of a float type, int8 or fp8; of 4 bits
             [.., out_features, groups * group // 2] uint8, where a byte's low bits are of the first
             half of a group and its high bits of the second, 8 added to each
    scales   [.., out_features, groups], bf16, and float32 of fp8; None of a dense weight
    group    how many numbers share a scale
    """

    numbers: Tensor
    scales: Tensor | None
    group: int
    in_features: int

    @classmethod
    def dense(cls, numbers: Tensor) -> "Weight":
        """Return the weight that is its own numbers."""
        return cls(numbers, None, numbers.shape[-1], numbers.shape[-1])

    @property
    def out_features(self) -> int:
        return self.numbers.shape[-2]

    @property
    def bits(self) -> int:
        return 4 if self.numbers.dtype == torch.uint8 else 8 * self.numbers.itemsize

    def __getitem__(self, index: Tensor | slice) -> "Weight":
        """Return the weight of some rows; by numbers [rows] int64, of these in their order."""
        scales = None if self.scales is None else _chosen(self.scales, index)
        numbers = _chosen(_as_bytes(self.numbers), index).view(self.numbers.dtype)
        return replace(self, numbers=numbers, scales=scales)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return what rows stand for: [rows, in_features], bf16 of a packed weight."""
        weight = self[index]
        numbers, scales = weight.numbers, weight.scales
        if scales is None:
            return numbers
        if self.bits == 4:
            halves = numbers.view(len(numbers), -1, 1, self.group // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).to(torch.int8) - 8
        groups = numbers.reshape(*scales.shape, -1)
        values = (groups.to(torch.bfloat16) * scales[..., None]).to(torch.bfloat16)
        return values.view(len(scales), -1)[:, : self.in_features]


def stack(weights: Sequence[Weight]) -> Weight:
    """Return weights of one shape and kind as one, [weights, out_features, in_features]."""
    first = weights[0]
    numbers = torch.stack([_as_bytes(weight.numbers) for weight in weights]).view(
        first.numbers.dtype
    )
    scales = [weight.scales for weight in weights if weight.scales is not None]
    return replace(first, numbers=numbers, scales=torch.stack(scales) if scales else None)


def _chosen(tensor: Tensor, index: Tensor | slice) -> Tensor:
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _as_bytes(numbers: Tensor) -> Tensor:
    """Return numbers as a type that every operation of torch knows."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
