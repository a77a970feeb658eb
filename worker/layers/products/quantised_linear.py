"""Products with a weight of 8 or 4 bits on a GPU (W8A16, W4A16): weight-only quantization."""

import torch
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.worker.layers.products.product import Linear, Pass

_FEW_ROWS = 128  # rows, up to which the weight is best read as it is kept
_PIECE = 8192  # rows of a weight that are widened at a time, for many rows
_TILE_ROWS = 16  # in deterministic mode, of every product


class QuantisedLinear(Linear):
    """A product: x [tokens, in_features] bf16 -> [tokens, out_features].

    Few rows are multiplied by a kernel that reads the numbers as they are kept. For many the weight
    is widened, a piece at a time, and multiplied by torch. In deterministic mode the kernel takes
    all rows, in tiles of one size.
    """

    weight: Weight

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        out = x.new_empty(len(x), self.weight.out_features)
        if _is_few(x, pass_):
            return self._read(x, out, pass_)
        for start in range(0, out.shape[1], _PIECE):
            piece = slice(start, start + _PIECE)
            out[:, piece] = x @ self.weight.rows(piece).t()
        if self.bias is not None:
            out += self.bias
        return out if self.factor == 1.0 else out.mul_(self.factor)

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        """Add the product to residual [tokens, out_features], contiguous, in place; return it."""
        if _is_few(x, pass_):
            return self._read(x, residual, pass_, adds=True)
        return super().add(x, residual, pass_)

    def wide(self, x: Tensor, pass_: Pass) -> Tensor:
        if _is_few(x, pass_):
            out = x.new_empty(len(x), self.weight.out_features, dtype=torch.float32)
            return self._read(x, out, pass_)
        return super().wide(x, pass_)

    def _read(self, x: Tensor, out: Tensor, pass_: Pass, *, adds: bool = False) -> Tensor:
        """Multiply by the numbers as they are kept, into out or added to it."""
        # Imported here: not every platform without a GPU has triton.
        from penstock.kernels.linear.quantised_triton import quantised_product

        return quantised_product(
            x,
            self.weight,
            self.bias,
            out,
            factor=self.factor,
            adds=adds,
            tile_rows=_TILE_ROWS if pass_.deterministic else None,
        )


def _is_few(x: Tensor, pass_: Pass) -> bool:
    return pass_.deterministic or len(x) <= _FEW_ROWS
