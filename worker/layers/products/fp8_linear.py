"""Products of rows and weights in FP8 (e4m3, W8A8), on a GPU that multiplies them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.fp8 import FP8, quantise_rows
from penstock.kernels.rows.activation import Activation
from penstock.worker.layers.products.product import Linear, Pass

__all__ = ["FP8", "MULTIPLE", "Fp8Linear", "lacks_fp8_products"]

MULTIPLE = 16  # each side of a weight is one of it, as torch's product wants
_TILE_ROWS = 32  # rows of a deterministic product
_LEAST = (9, 0)  # capability of a GPU whose product takes a scale for each row


def lacks_fp8_products(device: torch.device) -> str | None:
    """Return why a GPU computes no such products; None where it does."""
    if torch.version.hip is not None:
        return "an AMD GPU has other numbers of eight bits"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST:
        return f"a {torch.cuda.get_device_name(device)} is older than capability 9.0"
    return None


class Fp8Linear(Linear):
    """A product: x [tokens, in_features] bf16 -> [tokens, out_features].

    Each row of the weight has a scale, and each row of x gets one as it comes. Sums are float32.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        assert weight.scales is not None, "such numbers have scales"
        numbers, scales, out = weight.numbers, weight.scales, weight.out_features
        if padding := -out % MULTIPLE:  # rows that fill up
            numbers = F.pad(numbers.view(torch.uint8), (0, 0, 0, padding)).view(FP8)
            scales = F.pad(scales, (0, 0, 0, padding), value=1.0)
            bias = None if bias is None else F.pad(bias, (0, padding))
            weight = replace(weight, numbers=numbers[:out], scales=scales[:out])
        super().__init__(weight, bias, activation, factor)
        self._numbers, self._scales, self._out_features = numbers, scales, out

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        product = self._multiply(x, pass_)
        if self._out_features < len(self._numbers):
            product = product[:, : self._out_features].contiguous()
        return product if self.factor == 1.0 else product.mul_(self.factor)

    def _multiply(self, x: Tensor, pass_: Pass) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self._numbers))
        rows, scales = quantise_rows(x)
        if not pass_.deterministic:
            return self._scaled(rows, scales)
        padding = -len(x) % _TILE_ROWS
        rows = F.pad(rows.view(torch.uint8), (0, 0, 0, padding)).view(FP8)
        tiles = zip(
            torch.split(rows, _TILE_ROWS),
            torch.split(F.pad(scales, (0, 0, 0, padding), value=1.0), _TILE_ROWS),
            strict=True,
        )
        return torch.cat([self._scaled(*tile) for tile in tiles])[: len(x)]

    def _scaled(self, rows: Tensor, scales: Tensor) -> Tensor:
        return torch._scaled_mm(
            rows,
            self._numbers.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            bias=self.bias,
            out_dtype=torch.bfloat16,
        )
