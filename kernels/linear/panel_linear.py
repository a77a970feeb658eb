"""Products of bf16 rows, in compiled code, with weights of 16, 8 or 4 bits (W8A8, W4A8).

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


class _After(IntEnum):
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


class PanelLinear:
    """A product in compiled code: x [rows, in_features] bf16, contiguous -> [rows, out_features].

    It keeps the weight as panels, not the weight itself.

    activation  what `activated` applies; one that multiplies takes two weights of one shape, one
                below the other
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
        self.activation = _After[activation.upper()] if activation else _After.NARROW
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
        self.packed = PackedWeight(
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out_features,
            self.in_features,
            self._bits,
            self._group,
            factor,
        )
        self._weight = ctypes.byref(self.packed)

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

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.new_empty(len(x), self.out_features), _After.NARROW)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the product to residual [rows, out_features], contiguous, in place; return it."""
        return self._multiply(x, residual, _After.ADD)

    def activated(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.new_empty(len(x), self.out_features), self.activation)

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product in float32, never rounded to bf16.

        out  a contiguous tensor for the result; None means a new one
        """
        if out is None:
            out = x.new_empty(len(x), self.out_features, dtype=torch.float32)
        return self._multiply(x, out, _After.WIDE)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight: index [n] int64 -> [n, in_features]."""
        out = torch.empty(len(index), self.in_features, dtype=torch.bfloat16)
        self.ops.rows_of(self._weight, index.data_ptr(), out.data_ptr(), len(index))
        return out

    def _multiply(self, x: Tensor, out: Tensor, after: _After) -> Tensor:
        failed = self.ops.linear(x.data_ptr(), self._weight, out.data_ptr(), len(x), after)
        if failed:
            raise MemoryError(f"a product of {len(x)} rows found no memory to lay them out")
        return out
