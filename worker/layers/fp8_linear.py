"""Products of rows and weights in FP8 (e4m3, W8A8), on a GPU that multiplies them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.numbers.fp8 import FP8, quantise_rows, quantise_rows_ref
from penstock.kernels.rows.activation import Activation, activate, activate_rowwise

__all__ = ["FP8", "MULTIPLE", "Fp8Linear", "lacks_fp8_products"]

MULTIPLE = 16  # each side of a weight is one of it, as torch's product wants
_ROWS = 1024  # rows of a weight that are rounded at a time
_TILE_ROWS = 32  # rows of a deterministic product
_LEAST = (9, 0)  # capability of a GPU whose product takes a scale for each row


def lacks_fp8_products(device: torch.device) -> str | None:
    """Return why a GPU computes no such products; None where it does."""
    if torch.version.hip is not None:
        return "an AMD GPU has other numbers of eight bits"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST:
        return f"a {torch.cuda.get_device_name(device)} is older than capability 9.0"
    return None


class Fp8Linear:
    """A product: x [tokens, in_features] bf16 -> [tokens, out_features].

    Each row of the weight has a scale, and each row of x gets one as it comes. Sums are float32.

    numbers  [out_features, filled up to a multiple of 16, in_features] fp8
    scales   [.., 1] float32, one for each of its rows
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        deterministic: bool,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        self.out_features = len(weight)
        missing = -self.out_features % MULTIPLE
        size = self.out_features + missing, weight.shape[1]
        self.numbers = torch.zeros(size, dtype=torch.uint8, device=weight.device).view(FP8)
        self.scales = torch.ones((size[0], 1), dtype=torch.float32, device=weight.device)
        for start in range(0, self.out_features, _ROWS):
            numbers, scales = quantise_rows_ref(weight[start : start + _ROWS])
            self.numbers[start : start + len(numbers)] = numbers
            self.scales[start : start + len(scales)] = scales
        self.bias = None if bias is None else F.pad(bias, (0, missing))
        self.deterministic = deterministic
        self._activate = activate_rowwise if deterministic else activate
        self.activation, self.factor = activation, factor

    def __call__(self, x: Tensor) -> Tensor:
        product = self._multiply(x)
        if self.out_features < len(self.numbers):
            product = product[:, : self.out_features].contiguous()
        return product if self.factor == 1.0 else product.mul_(self.factor)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))

    def wide(self, x: Tensor) -> Tensor:
        return self(x).to(torch.float32)

    def activated(self, x: Tensor) -> Tensor:
        assert self.activation is not None, "who makes the product says what becomes of it"
        return self._activate(self(x), self.activation)

    def _multiply(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self.numbers))
        rows, scales = quantise_rows(x)
        if not self.deterministic:
            return self._scaled(rows, scales)
        missing = -len(x) % _TILE_ROWS
        rows = F.pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        tiles = zip(
            torch.split(rows, _TILE_ROWS),
            torch.split(F.pad(scales, (0, 0, 0, missing), value=1.0), _TILE_ROWS),
            strict=True,
        )
        return torch.cat([self._scaled(*tile) for tile in tiles])[: len(x)]

    def _scaled(self, rows: Tensor, scales: Tensor) -> Tensor:
        return torch._scaled_mm(
            rows,
            self.numbers.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            bias=self.bias,
            out_dtype=torch.bfloat16,
        )
