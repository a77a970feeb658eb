"""Weights of 16, 8 or 4 bits as compiled code multiplies bf16 rows with them (W8A8, W4A8).

`cpu/linear.c` describes the algorithm.
A row's bits do not depend on the rows that come with it.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.device import ops_for
from penstock.kernels.numbers.huge_pages import take
from penstock.kernels.rows.activation import Activation, num_parts

_PANEL = 16  # columns of a panel, which lie side by side
_DEPTH = 32  # in_features of packed numbers must be a multiple of this
_SPANS = {torch.int8: 16, torch.uint8: 32}  # and their groups of these


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


def panel_ops(weight: Weight, packing: Packing) -> ctypes.CDLL | None:
    """Return the compiled operations if they can multiply with such a weight, else None.

    packing  of a dense weight
    """
    numbers, group = weight.numbers, weight.group
    if weight.scales is None:
        return ops_for(numbers) if weight.in_features % packing.depth == 0 else None
    span = _SPANS.get(numbers.dtype)
    fits = span and group % span == 0 and weight.in_features % group == 0
    is_deep = weight.in_features % _DEPTH == 0
    return ops_for(numbers.new_empty(0, dtype=torch.bfloat16)) if fits and is_deep else None


class After(IntEnum):
    """The last operation on a product's sums; the C code has the same numbers."""

    NARROW = 0  # bf16
    ADD = 1  # bf16, added to the output
    WIDE = 2  # float32
    SILU_MUL = 3  # bf16, as the others: what `penstock.kernels.rows.activation` has
    GELU_MUL = 4
    GELU = 5
    RELU2 = 6
    CLAMPED_MUL = 7


class PackedWeight(ctypes.Structure):
    """A weight as compiled operations take it: `struct weight`, with addresses of its memory."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("panels", "scales", "mins", "bias", "order")],
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
        weight: Weight,
        bias: Tensor | None,
        packing: Packing = PACKINGS["bf16"],
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        parts = num_parts(activation) if activation else 1
        self.ops = ops
        self.activation = After[activation.upper()] if activation else After.NARROW
        self.out_features, self.in_features = weight.out_features // parts, weight.in_features
        columns = -(-self.out_features // _PANEL) * _PANEL
        if weight.scales is not None:
            packing = Packing(weight.bits, weight.group)
        self._bits, self._group = packing.bits, packing.group or self.in_features
        size = columns * self.in_features * packing.bits // 8
        self._panels = take(parts * size).view(parts, size)
        groups = -(-self.in_features // self._group) if packing.bits < 16 else 0
        self._scales = torch.zeros(parts, groups, columns)
        self._mins = None if weight.mins is None else torch.zeros_like(self._scales)
        self._order = None if weight.order is None else weight.order.to(torch.int32)
        for part in range(parts):
            rows = slice(part * self.out_features, (part + 1) * self.out_features)
            self._pack(weight[rows], part)
        self._bias = None if bias is None else _filled_up(bias.view(parts, -1), columns)
        self.layout = PackedWeight(
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            _address(self._mins),
            _address(self._bias),
            _address(self._order),
            self.out_features,
            self.in_features,
            self._bits,
            self._group,
            factor,
        )
        self._weight = ctypes.byref(self.layout)

    @property
    def is_ordered(self) -> bool:
        """Return whether numbers of a row lie in the order of their features."""
        return self._order is None

    def _pack(self, weight: Weight, part: int) -> None:
        numbers = weight.numbers.contiguous()
        place, panels = numbers.data_ptr(), self._panels[part].data_ptr()
        shape, columns = (weight.out_features, weight.in_features), slice(weight.out_features)
        if self._bits == 16:
            self.ops.pack(place, panels, *shape)
        elif weight.scales is None:
            scales = self._scales[part].data_ptr()
            self.ops.quantise_weight(place, panels, scales, *shape, self._bits, self._group)
        else:
            self.ops.pack_numbers(place, panels, *shape, self._bits, self._group)
            self._scales[part, :, columns] = weight.scales.t()
        if self._mins is not None and weight.mins is not None:
            self._mins[part, :, columns] = weight.mins.t()

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


def _filled_up(biases: Tensor, columns: int) -> Tensor:
    return F.pad(biases.float(), (0, columns - biases.shape[1])).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
