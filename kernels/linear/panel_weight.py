"""Weights of 16, 8 or 4 bits as compiled code multiplies bf16 rows with them (W8A8, W4A8).

`cpu/linear.c` describes the algorithm.
A row's bits do not depend on the rows that come with it.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from penstock.kernels.numbers.device import ops_for
from penstock.kernels.numbers.huge_pages import take
from penstock.kernels.rows.activation import Activation, num_parts

_PANEL = 16  # columns of a panel, which lie side by side


@dataclass(frozen=True, slots=True)
class Packing:
    """The packing of a weight.

    bits   bits of a number
    group  how many numbers along the inner dimension share a scale
    """

    bits: int
    group: int | None = None  # None means all share one; the last group may have fewer
    depth: int = 64  # in_features must be a multiple of this


PACKINGS = {
    "bf16": Packing(16, depth=32),
    "int8": Packing(8),
    "int4_g64": Packing(4, 64),
    "int4_g128": Packing(4, 128),
}


def panel_ops(weight: Tensor, packing: Packing) -> ctypes.CDLL | None:
    """Return the compiled operations if they can multiply with such a weight, else None."""
    return ops_for(weight) if weight.shape[1] % packing.depth == 0 else None


class After(IntEnum):
    """The last operation on a product's sums; the C code has the same numbers."""

    NARROW = 0  # bf16
    ADD = 1  # bf16, added to the output
    WIDE = 2  # float32
    SILU_MUL = 3  # bf16, as the others: what `penstock.kernels.rows.activation` has
    GELU_MUL = 4
    GELU = 5
    RELU2 = 6


class PackedWeight(ctypes.Structure):
    """A weight as compiled operations take it: `struct weight`, with addresses of its memory."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("panels", "scales", "bias")],
        *[(name, ctypes.c_int) for name in ("n", "k", "bits", "group")],
        ("factor", ctypes.c_float),
    )


class PanelWeight:
    """A weight as panels, with what a product makes of its sums; the weight itself is not kept.

    activation  what the product applies to its sums, if anything; one that multiplies takes two
                weights of one shape, one below the other
    factor      by which the product with its bias is multiplied
    """

    def __init__(
        self,
        ops: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        packing: Packing = PACKINGS["bf16"],
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        parts = num_parts(activation) if activation else 1
        self.activation = After[activation.upper()] if activation else After.NARROW
        self.out_features, self.in_features = weight.shape[0] // parts, weight.shape[1]
        columns = -(-self.out_features // _PANEL) * _PANEL
        self.ops = ops
        self._bits, self._group = packing.bits, packing.group or self.in_features
        size = columns * self.in_features * packing.bits // 8
        self._panels = take(parts * size).view(parts, size)
        groups = -(-self.in_features // self._group) if packing.bits < 16 else 0
        self._scales = torch.empty(parts, groups, columns, dtype=torch.bfloat16)
        for part, rows in enumerate(weight.chunk(parts)):
            self._pack(rows.contiguous(), part)
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(parts, columns)
            self._bias[:, : self.out_features] = bias.view(parts, -1)
        self.layout = PackedWeight(
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
            self._bits,
            self._group,
            factor,
        )
        self._weight = ctypes.byref(self.layout)

    def _pack(self, weight: Tensor, part: int) -> None:
        panels = self._panels[part].data_ptr()
        if self._bits == 16:
            self.ops.pack(weight.data_ptr(), panels, *weight.shape)
            return
        self.ops.quantise_weight(
            weight.data_ptr(),
            panels,
            self._scales[part].data_ptr(),
            *weight.shape,
            self._bits,
            self._group,
        )

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight: index [n] int64 -> [n, in_features]."""
        out = torch.empty(len(index), self.in_features, dtype=torch.bfloat16)
        self.ops.rows_of(self._weight, index.data_ptr(), out.data_ptr(), len(index))
        return out

    def multiply(self, x: Tensor, out: Tensor, after: After) -> Tensor:
        """Write the product of x [rows, in_features] bf16, contiguous; return `out`.

        out  [rows, out_features], contiguous, of the type that `after` says
        """
        has_failed = self.ops.linear(x.data_ptr(), self._weight, out.data_ptr(), len(x), after)
        if has_failed:
            raise MemoryError(f"a product of {len(x)} rows found no memory to lay them out")
        return out
