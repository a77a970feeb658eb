"""Products with a dense weight, by torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.device import on_gpu
from penstock.kernels.rows.activation import Activation
from penstock.worker.layers.products.product import Linear, Pass

Product = Callable[[Tensor], Tensor]

# oneDNN lays a weight out for this number of rows; other numbers use the same layout.
_PACKED_FOR_ROWS = 64
# A product's rounding depends on its number of rows, so deterministic products all have this many.
_TILE_ROWS = 32


class TorchLinear(Linear):
    """A product computed by torch, in the way that is fastest on the device."""

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        numbers = weight.numbers
        packs = _packs(numbers) and not on_gpu(numbers)
        super().__init__(None if packs else weight, bias, activation, factor)
        self._product = _packed(numbers, bias) if packs else _plain(numbers, bias)
        one_step = numbers.device.type != "cpu" and bias is None
        # The transposed weight where the product and a sum are one operation.
        self._weight_t = numbers.t() if one_step and factor == 1.0 else None

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        product = _in_tiles(self._product, x) if pass_.deterministic else self._product(x)
        return product if self.factor == 1.0 else product.mul_(self.factor)

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        if self._weight_t is not None and not pass_.deterministic:
            return residual.addmm_(x, self._weight_t)
        return residual + self(x, pass_)  # in one operation ends of vectors would round otherwise


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    """Return oneDNN's product with the weight laid out once; `F.linear` does so in every call."""
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, layout, bias, "none", [], "")


def _in_tiles(product: Product, x: Tensor) -> Tensor:
    """Return the product of x, whose rows are bitwise the same whatever rows come with them."""
    rows = x.shape[0]
    full_rows = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS))
    return torch.cat([product(tile) for tile in torch.split(full_rows, _TILE_ROWS)])[:rows]
