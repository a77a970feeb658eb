"""Products with a weight matrix, each computed in the fastest way that the machine has."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear.panel_linear import PanelLinear, panel_ops
from penstock.kernels.numbers.device import on_gpu, runs_triton
from penstock.kernels.rows.activation import Activation, activate, activate_rowwise, num_parts
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.fp8_linear import MULTIPLE, Fp8Linear, lacks_fp8_products
from penstock.worker.layers.quantised_linear import QuantisedLinear

__all__ = ["Activation", "Linear", "linear", "num_parts", "unsupported"]

Product = Callable[[Tensor], Tensor]

# oneDNN lays a weight out for this number of rows; other numbers use the same layout.
_PACKED_FOR_ROWS = 64
# A product's rounding depends on its number of rows, so deterministic products all have this many.
_TILE_ROWS = 32


class Linear(Protocol):
    """A product: x [tokens, in_features] -> [tokens, out_features], both contiguous."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the product plus residual [tokens, out_features], which may be overwritten."""

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in float32."""

    def activated(self, x: Tensor) -> Tensor:
        """Return what the product's activation makes of it, as `kernels.rows.activation` has it."""


def linear(
    weight: Tensor,
    bias: Tensor | None,
    arithmetic: Arithmetic,
    activation: Activation | None = None,
    factor: float = 1.0,
) -> Linear:
    """Return the fastest product with weight [out_features, in_features].

    The weight itself is kept only if no better layout is made of it.

    activation  only `activated` is called on the result
    factor      by which the product with its bias is multiplied
    """
    deterministic = arithmetic.deterministic
    if arithmetic.quantization == "fp8":
        return Fp8Linear(weight, bias, deterministic, activation, factor)
    ops = None if on_gpu(weight) else panel_ops(weight, arithmetic.packing)
    if ops is not None:
        return PanelLinear(ops, weight, bias, arithmetic.packing, activation, factor)
    if arithmetic.quantization is not None:
        assert on_gpu(weight), "who loads a model has asked `unsupported`"
        return QuantisedLinear(weight, bias, arithmetic.packing, deterministic, activation, factor)
    return TorchLinear(weight, bias, deterministic, activation, factor)


def unsupported(width: int, device: torch.device, arithmetic: Arithmetic) -> str | None:
    """Return why weights with such an inner dimension cannot be quantised; None where they can."""
    name = arithmetic.quantization
    if name is None:
        return None
    depth = MULTIPLE if name == "fp8" else arithmetic.packing.depth
    if width % depth:
        return (
            f"{name} takes multiples of {depth}, and a width of the model is {width}; leave it out"
        )
    if name == "fp8":
        lacks = lacks_fp8_products(device) if runs_triton(device) else f"this is a {device.type}"
        return lacks and f"fp8 is for NVIDIA GPUs of capability 9.0 and more; {lacks}; leave it out"
    if runs_triton(device):
        return None
    if device.type != "cpu":
        return f"{name} is for CPUs and CUDA, and the device is {device.type}; leave it out"
    if panel_ops(torch.empty(0, width, dtype=torch.bfloat16), arithmetic.packing) is None:
        return (
            f"{name} needs CPU operations, which were not compiled (the log says why); "
            "install a C compiler, or leave it out"
        )
    return None


class TorchLinear:
    """A product computed by torch, in the way that is fastest on the device.

    weight  None where a better layout was made of it
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        deterministic: bool,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        packs = _packs(weight) and not on_gpu(weight)
        product = _packed(weight, bias) if packs else _plain(weight, bias)
        self.weight, self.bias = None if packs else weight, bias
        self.deterministic, self.activation, self.factor = deterministic, activation, factor
        self._product = _in_tiles(product) if deterministic else product
        self._activate = activate_rowwise if deterministic else activate
        one_step = weight.device.type != "cpu" and not deterministic and bias is None
        # The transposed weight where the product and a sum are one operation.
        self._added = weight.t() if one_step and factor == 1.0 else None

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product(x)
        return product if self.factor == 1.0 else product.mul_(self.factor)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._added is not None:
            return residual.addmm_(x, self._added)
        return residual + self(x)  # in one operation ends of vectors would round otherwise

    def wide(self, x: Tensor) -> Tensor:
        return self(x).to(torch.float32)

    def activated(self, x: Tensor) -> Tensor:
        assert self.activation is not None, "who makes the product says what becomes of it"
        return self._activate(self(x), self.activation)


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


def _in_tiles(product: Product) -> Product:
    """Return a product whose rows are bitwise the same whatever rows come with them."""

    def tiled(x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS))
        return torch.cat([product(tile) for tile in torch.split(padded, _TILE_ROWS)])[:rows]

    return tiled
