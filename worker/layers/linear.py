"""Products with a weight matrix, each the fastest way that the machine has."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]

# Rows for which oneDNN lays a weight out; other counts run from the same layout.
_PACKED_FOR_ROWS = 64
# A product's rounding depends on its number of rows, so deterministic products all have this many.
_TILE_ROWS = 32


class Linear:
    """x [tokens, in_features] -> [tokens, out_features]. Keeps the weight only if unpacked."""

    def __init__(self, weight: Tensor, bias: Tensor | None, deterministic: bool) -> None:
        self.out_features, self.in_features = weight.shape
        product = _packed(weight, bias) if _packs(weight) else _plain(weight, bias)
        self._product = _in_tiles(product) if deterministic else product

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    """oneDNN with the weight laid out once; `F.linear` lays it out again in every call."""
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, layout, bias, "none", [], "")


def _in_tiles(product: Product) -> Product:
    """Bitwise the same row whatever rows come with it."""

    def tiled(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS))
        return torch.cat([product(tile) for tile in torch.split(padded, _TILE_ROWS)])[:rows]

    return tiled
