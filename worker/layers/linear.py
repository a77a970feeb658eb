"""The choice of a product: each weight is multiplied in the fastest way that the machine has."""

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import PanelWeight, panel_ops
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.weight import Weight, joined
from penstock.kernels.numbers.device import on_gpu, runs_triton
from penstock.kernels.rows.activation import Activation, num_parts
from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.products.fp8_linear import FP8, MULTIPLE, Fp8Linear, lacks_fp8_products
from penstock.worker.layers.products.panel_linear import PanelLinear
from penstock.worker.layers.products.product import Linear
from penstock.worker.layers.products.quantised_linear import QuantisedLinear
from penstock.worker.layers.products.torch_linear import TorchLinear

__all__ = [
    "Activation",
    "Linear",
    "Weight",
    "joined",
    "linear",
    "multiplies",
    "num_parts",
    "unsupported",
]


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
    is_fp8 = arithmetic.quantization == "fp8"
    packing = AS_IT_IS.packing if is_fp8 or weight.scales is not None else arithmetic.packing
    ops = None if on_gpu(weight.numbers) else panel_ops(weight, packing)
    if ops is not None:
        return PanelLinear(PanelWeight(ops, weight, bias, packing, activation, factor))
    if weight.scales is None:
        if arithmetic.quantization is None:
            return TorchLinear(weight, bias, activation, factor)
        weight = quantise_fp8(weight.numbers) if is_fp8 else quantise(weight.numbers, packing)
    assert on_gpu(weight.numbers), "who loads a model has asked `unsupported`"
    kind = Fp8Linear if weight.numbers.dtype == FP8 else QuantisedLinear
    return kind(weight, bias, activation, factor)


def multiplies(weight: Weight) -> bool:
    """Return whether packed numbers are multiplied as they are; otherwise they are widened."""
    if not on_gpu(weight.numbers):
        return panel_ops(weight, AS_IT_IS.packing) is not None
    is_plain = weight.mins is None and weight.order is None
    return is_plain and (weight.bits == 4 or weight.group == weight.in_features)


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
    empty = Weight.dense(torch.empty(0, width, dtype=torch.bfloat16))
    if panel_ops(empty, arithmetic.packing) is None:
        return (
            f"{name} needs CPU operations, which were not compiled (the log says why); "
            "install a C compiler, or leave it out"
        )
    return None
