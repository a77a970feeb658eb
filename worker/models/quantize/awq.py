"""AWQ: columns of strong inputs are scaled up before they are rounded, and their inputs down.

Lin, Tang, Tang, Yang, Dang, Han: "AWQ: Activation-aware Weight Quantization for LLM Compression
and Acceleration", 2023, equations 4 and 5. The scales are the magnitudes of inputs to a power, the
best of twenty. With H = X^T X of inputs X, a weight that becomes W + D costs tr(D H D^T). What
scales inputs down is folded into what gives them, where that is exact: a norm, or the rows of the
product before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.worker.models.folder.errors import UnsupportedModel
from penstock.worker.models.quantize.layer_inputs import Inputs, Run
from penstock.worker.models.quantize.rounding import rounded
from penstock.worker.models.quantize.scheme import Scheme

_POWERS = [step / 20 for step in range(20)]
_LEAST = 1e-4  # magnitude of what hardly ever comes in, which is not to be divided by
_FARTHEST = 0.05  # share by which a layer may give others, once what is folded has been rounded
# Rows of a product that are the inputs of another, times what does not depend on them.
_BEFORE = {"down_proj": ("up_proj", "gate_proj"), "o_proj": ("v_proj", "v_proj")}


def scale_layer(
    layer: nn.Module, inputs: Sequence[Inputs], states: Tensor, run: Run, scheme: Scheme
) -> None:
    """Scale the products of a layer and what is before them, so that the layer gives the same.

    Raises UnsupportedModel where it then gives something else.

    states  those of a window, by which this is told
    """
    before = run(states)
    for group in inputs:
        readers = [_product(layer, name) for name in group.readers]
        giver = _giver(layer, group)
        if giver is None:
            continue
        scales = _best_scales(readers, group, scheme)
        if isinstance(giver, nn.Linear):
            _fold_into_rows(giver, scales)
        else:
            scales = _fold_into_norm(giver, scales)
        for reader in readers:
            _set(reader, "weight", reader.weight.float() * scales)
    change = (run(states) - before).norm() / (before - states).norm()
    if not change < _FARTHEST:
        raise UnsupportedModel(
            f"scales of inputs do not fold into the layers of this model (they change by "
            f"{float(change):.0%}); take --method gptq"
        )


def _giver(layer: nn.Module, inputs: Inputs) -> nn.Module | None:
    """Return the module that the scales of inputs fold into exactly; None where none is."""
    if inputs.norm is not None:
        return layer.get_submodule(inputs.norm)
    if len(inputs.readers) > 1:
        return None
    place, _, name = inputs.readers[0].rpartition(".")
    siblings = dict(layer.get_submodule(place).named_children())
    names = _BEFORE.get(name, ())
    if not names or not siblings.keys() >= set(names):
        return None
    giver = siblings[names[0]]
    is_fitting = isinstance(giver, nn.Linear) and giver.out_features == len(inputs.magnitude)
    return giver if is_fitting else None


def _best_scales(readers: Sequence[nn.Linear], inputs: Inputs, scheme: Scheme) -> Tensor:
    """Return the scales [columns] with which the rounded weights cost least."""
    weight = torch.cat([reader.weight for reader in readers]).float()
    dtype, best, least = readers[0].weight.dtype, torch.ones_like(inputs.magnitude), float("inf")
    for power in _POWERS:
        scales = inputs.magnitude.clamp(min=_LEAST) ** power
        scales = scales / (scales.max() * scales.min()).sqrt()
        change = rounded(weight * scales, scheme, dtype).dense() / scales - weight
        cost = float(((change @ inputs.hessian) * change).sum())
        if cost < least:
            best, least = scales, cost
    return best


def _fold_into_rows(giver: nn.Linear, scales: Tensor) -> None:
    _set(giver, "weight", giver.weight.float() / scales[:, None])
    if giver.bias is not None:
        _set(giver, "bias", giver.bias.float() / scales)


def _fold_into_norm(norm: nn.Module, scales: Tensor) -> Tensor:
    """Divide what a norm gives by scales; return these as they are once its weight is rounded.

    A norm multiplies by its weight, or by one more than it.
    """
    weight = norm.get_parameter("weight")
    whole = weight.float() + (offset := _offset(norm))
    _set(norm, "weight", whole / scales - offset)
    after = norm.get_parameter("weight").float() + offset
    exact = torch.where(after == 0, scales, whole / after)
    if getattr(norm, "bias", None) is not None:
        _set(norm, "bias", norm.get_parameter("bias").float() / exact)
    return exact


def _offset(norm: nn.Module) -> int:
    """Return what a norm adds to its weight: 1 where it lets through what a weight of 0 stops."""
    weight = norm.get_parameter("weight")
    x = torch.arange(1.0, len(weight) + 1, device=weight.device, dtype=weight.dtype)
    numbers = weight.clone()
    bias = getattr(norm, "bias", None)
    weight.zero_()
    offset = int(bool((norm(x) - (0 if bias is None else bias)).any()))
    weight.copy_(numbers)
    return offset


def _product(layer: nn.Module, name: str) -> nn.Linear:
    product = layer.get_submodule(name)
    assert isinstance(product, nn.Linear)
    return product


def _set(module: nn.Module, name: str, numbers: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(numbers.to(old.dtype), requires_grad=False))
