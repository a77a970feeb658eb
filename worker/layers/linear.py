"""The choice of a product: each weight is multiplied in the fastest way that the machine has."""

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import PanelWeight, panel_ops
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.device import on_gpu, runs_triton
from penstock.kernels.rows.activation import Activation, num_parts
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.products.fp8_linear import FP8, MULTIPLE, Fp8Linear, lacks_fp8_products
from penstock.worker.layers.products.panel_linear import PanelLinear
from penstock.worker.layers.products.product import Linear
from penstock.worker.layers.products.quantised_linear import QuantisedLinear
from penstock.worker.layers.products.torch_linear import TorchLinear

__all__ = ["Activation", "Linear", "Weight", "linear", "num_parts", "unsupported"]


def linear(
    weight: Weight,
    bias: Tensor | None,
    arithmetic: Arithmetic,
    activation: Activation | None = None,
    factor: float = 1.0,
) -> Linear:
    """Return the fastest product with a weight, which is kept only if no better layout is made.

    A dense weight gets the arithmetic's bits; a packed one has its own.

    activation  only `activated` is called on the result
    factor      by which the product with its bias is multiplied
    """
    numbers = weight.numbers
    if weight.scales is None and arithmetic.quantization == "fp8":
        weight = quantise_fp8(numbers)
    elif weight.scales is None:
        packing = arithmetic.packing
        ops = None if on_gpu(numbers) else panel_ops(numbers, packing)
        if ops is not None:
            return PanelLinear(PanelWeight(ops, numbers, bias, packing, activation, factor))
        if arithmetic.quantization is None:
            return TorchLinear(weight, bias, activation, factor)
        assert on_gpu(numbers), "who loads a model has asked `unsupported`"
        weight = quantise(numbers, packing)
    kind = Fp8Linear if weight.numbers.dtype == FP8 else QuantisedLinear
    return kind(weight, bias, activation, factor)


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
