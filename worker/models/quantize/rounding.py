"""The rounding of weights to few bits, each group of a row by a scale and a zero point.

Rows are features that come out; a group is of neighbouring columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.worker.models.quantize.scheme import Scheme

FLOAT8 = torch.float8_e4m3fn
_LARGEST_FLOAT8 = torch.finfo(FLOAT8).max


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that the weights of a group may become: (n - zero) * scale.

    scale  [rows, ...], float32, exact in the type that it is written in
    zero   as scale, whole numbers
    """

    scale: Tensor
    zero: Tensor

    def numbers(self, weight: Tensor, scheme: Scheme) -> Tensor:
        """Return the nearest number of each weight, in float32."""
        if scheme.is_float:
            within = (weight / self.scale).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
            return within.to(FLOAT8).float()
        half = 2 ** (scheme.bits - 1)
        return (torch.round(weight / self.scale) + self.zero).clamp(-half, half - 1)

    def dense(self, numbers: Tensor) -> Tensor:
        return (numbers - self.zero) * self.scale


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight of few bits.

    numbers  [rows, columns], in float32
    grid     scales and zero points [rows, groups]
    """

    numbers: Tensor
    grid: Grid

    def dense(self) -> Tensor:
        """Return what the numbers stand for, [rows, columns] in float32."""
        rows, groups = self.grid.scale.shape
        grid = Grid(self.grid.scale.unsqueeze(-1), self.grid.zero.unsqueeze(-1))
        return grid.dense(self.numbers.view(rows, groups, -1)).view(rows, -1)


def grid_of(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid:
    """Return the grid of groups [..., columns], as [...]: all of a group is within it.

    dtype  of the scales where they are written
    """
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    if scheme.is_float:
        scale = torch.maximum(high, -low) / _LARGEST_FLOAT8
    elif scheme.is_symmetric:
        scale = torch.maximum(high, -low) / ((2**scheme.bits - 1) / 2)
    else:
        scale = (high - low) / (2**scheme.bits - 1)
    scale = scale.to(dtype).float()
    scale[scale == 0] = 1.0  # a group of zeros, or of less than the type can say
    zero = torch.zeros_like(scale)
    if not scheme.is_symmetric:
        half = 2 ** (scheme.bits - 1)
        zero = torch.round(-half - low / scale).clamp(-half, half - 1)
    return Grid(scale, zero)


def rounded(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Rounded:
    """Return the weight with each number rounded to the nearest of its group's grid."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, scheme.group_size or columns)
    grid = grid_of(groups, scheme, dtype)
    numbers = Grid(grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1)).numbers(groups, scheme)
    return Rounded(numbers.view(rows, columns), grid)


def rounded_rows(x: Tensor, scheme: Scheme) -> Tensor:
    """Return what is multiplied as readers round it: each row by its largest number."""
    wide = x.float()
    grid = grid_of(wide, Scheme("int8", 8, is_float=scheme.is_float), torch.float32)
    grid = Grid(grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1))
    return grid.dense(grid.numbers(wide, scheme)).to(x.dtype)
