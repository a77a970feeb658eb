"""Products with a weight of 8 or 4 bits on a GPU (W8A16, W4A16): weight-only quantization."""

import torch
from torch import Tensor

from penstock.kernels.linear.panel_linear import Packing
from penstock.kernels.linear.quantise import quantise
from penstock.kernels.rows.activation import Activation, activate, activate_rowwise

_FEW = 128  # rows, up to which the weight is best read as it is kept
_PIECE = 8192  # rows of a weight that are widened at a time, for many rows
_TILE_ROWS = 16  # in deterministic mode, of every product


class QuantisedLinear:
    """A product: x [tokens, in_features] bf16 -> [tokens, out_features].

    Few rows are multiplied by a kernel that reads the numbers as they are kept. For many the weight
    is widened, a piece at a time, and multiplied by torch. In deterministic mode the kernel takes
    all rows, in tiles of one size.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        packing: Packing,
        deterministic: bool,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        self._weight = quantise(weight, packing)
        self._bias = bias
        self._deterministic = deterministic
        self._activate = activate_rowwise if deterministic else activate
        self._activation = activation
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._new(x, x.dtype))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the product to residual [tokens, out_features], contiguous, in place; return it."""
        if self._is_few(x):
            return self._multiply(x, residual, adds=True)
        return residual.add_(self(x))

    def wide(self, x: Tensor) -> Tensor:
        if self._is_few(x):
            return self._multiply(x, self._new(x, torch.float32))
        return self(x).to(torch.float32)

    def activated(self, x: Tensor) -> Tensor:
        assert self._activation is not None, "who makes the product says what becomes of it"
        return self._activate(self(x), self._activation)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of the weight: index [n] int64 -> [n, in_features]."""
        return self._weight.rows(index)

    def _is_few(self, x: Tensor) -> bool:
        return self._deterministic or len(x) <= _FEW

    def _new(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.new_empty(len(x), self._weight.out_features, dtype=dtype)

    def _multiply(self, x: Tensor, out: Tensor, *, adds: bool = False) -> Tensor:
        if self._is_few(x):
            # Imported here: not every platform without a GPU has triton.
            from penstock.kernels.linear.quantised_triton import quantised_product

            return quantised_product(
                x,
                self._weight,
                self._bias,
                out,
                factor=self._factor,
                adds=adds,
                tile_rows=_TILE_ROWS if self._deterministic else None,
            )
        for start in range(0, out.shape[1], _PIECE):
            piece = slice(start, start + _PIECE)
            out[:, piece] = x @ self._weight.rows(piece).t()
        if self._bias is not None:
            out += self._bias
        return out if self._factor == 1.0 else out.mul_(self._factor)
