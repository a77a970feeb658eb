"""A weight as a device keeps it: dense, or as numbers of 8 or 4 bits with scales.

Numbers along the inner dimension share a scale in groups, of which the last may be short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.numbers.fp8 import FP8


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight [out_features, in_features], or a stack of several of one shape.

    numbers  [.., out_features, in_features] of a float type, int8 or fp8; of 4 bits
             [.., out_features, groups * group // 2] uint8, where a byte's low bits are of the first
             half of a group and its high bits of the second; 8 added to each if there are no mins
    scales   [.., out_features, groups], of fp8 float32; None of a dense weight
    group    how many numbers share a scale
    mins     [.., out_features, groups] float32: scale * number - min is what a number stands for
    order    [in_features] int64: the feature that each number of a row is of; None: its own
    """

    numbers: Tensor
    scales: Tensor | None
    group: int
    in_features: int
    mins: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def dense(cls, numbers: Tensor) -> "Weight":
        """Return the weight that is its own numbers."""
        return cls(numbers, None, numbers.shape[-1], numbers.shape[-1])

    @classmethod
    def of_nibbles(
        cls,
        numbers: Tensor,
        scales: Tensor,
        group: int,
        mins: Tensor | None = None,
        order: Tensor | None = None,
    ) -> "Weight":
        """Return a weight of 4 bits: numbers [out_features, in_features] uint8 below 16."""
        out_features, in_features = numbers.shape
        halves = F.pad(numbers, (0, -in_features % group)).view(out_features, -1, 2, group // 2)
        pairs = halves[:, :, 0] | halves[:, :, 1] << 4
        return cls(pairs.flatten(1), scales, group, in_features, mins, order)

    @property
    def out_features(self) -> int:
        return self.numbers.shape[-2]

    @property
    def bits(self) -> int:
        return 4 if self.numbers.dtype == torch.uint8 else 8 * self.numbers.itemsize

    def to(self, device: torch.device) -> "Weight":
        return replace(
            self,
            numbers=self.numbers.to(device),
            scales=None if self.scales is None else self.scales.to(device),
            mins=None if self.mins is None else self.mins.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def __getitem__(self, index: Tensor | slice) -> "Weight":
        """Return the weight of some rows; by numbers [rows] int64, of these in their order."""
        scales = None if self.scales is None else _chosen(self.scales, index)
        mins = None if self.mins is None else _chosen(self.mins, index)
        numbers = _chosen(_as_bytes(self.numbers), index).view(self.numbers.dtype)
        return replace(self, numbers=numbers, scales=scales, mins=mins)

    def rows(self, index: Tensor | slice, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return what rows stand for: [rows, in_features], of a packed weight in `dtype`."""
        weight = self[index]
        numbers, scales = weight.numbers, weight.scales
        if scales is None:
            return numbers
        if self.bits == 4:
            halves = numbers.view(len(numbers), -1, 1, self.group // 2)
            numbers = torch.cat((halves & 15, halves >> 4), 2).to(torch.int8)
            numbers = numbers if self.mins is not None else numbers - 8
        groups = numbers.reshape(*scales.shape, -1).float() * scales[..., None].float()
        values = groups if weight.mins is None else groups.sub_(weight.mins[..., None])
        rows = values.to(dtype).view(len(scales), -1)[:, : self.in_features]
        return (
            rows if self.order is None else torch.empty_like(rows).index_copy_(1, self.order, rows)
        )


def stack(weights: Sequence[Weight]) -> Weight:
    """Return weights of one shape and kind as one, [weights, out_features, in_features]."""
    return _joined(weights, torch.stack)


def joined(weights: Sequence[Weight]) -> Weight | None:
    """Return weights as one, each below the one before; None where they are not of one kind."""
    kinds = {
        (weight.numbers.dtype, weight.group, weight.scales is None, weight.mins is None)
        for weight in weights
    }
    orders = [weight.order for weight in weights]
    first = orders[0]
    is_one = all(
        order is first or (order is not None and first is not None and torch.equal(order, first))
        for order in orders
    )
    return _joined(weights, torch.cat) if len(kinds) == 1 and is_one else None


def _joined(weights: Sequence[Weight], join: Callable[[list[Tensor]], Tensor]) -> Weight:
    first = weights[0]
    if len(weights) == 1 and join is torch.cat:
        return first
    numbers = join([_as_bytes(weight.numbers) for weight in weights]).view(first.numbers.dtype)
    scales = [weight.scales for weight in weights if weight.scales is not None]
    mins = [weight.mins for weight in weights if weight.mins is not None]
    return replace(
        first,
        numbers=numbers,
        scales=join(scales) if scales else None,
        mins=join(mins) if mins else None,
    )


def _chosen(tensor: Tensor, index: Tensor | slice) -> Tensor:
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _as_bytes(numbers: Tensor) -> Tensor:
    """Return numbers as a type that every operation of torch knows."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
