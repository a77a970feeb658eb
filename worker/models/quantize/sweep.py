"""One pass over a model, layer by layer: each is read, rounded (GPTQ, AWQ ..), written and let go.

The states of the calibration's windows go along, so that a layer is rounded by what the rounded
ones before it give. Those of other windows do too, for the perplexity of both models.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.worker.models.quantize.awq import scale_layer
from penstock.worker.models.quantize.compressed import compressed
from penstock.worker.models.quantize.folder_writer import FolderWriter
from penstock.worker.models.quantize.gptq import gptq
from penstock.worker.models.quantize.layer_inputs import Run, inputs_of, products_of
from penstock.worker.models.quantize.layered import LayeredModel
from penstock.worker.models.quantize.rounding import Rounded, rounded, rounded_rows
from penstock.worker.models.quantize.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Perplexities:
    before: float
    after: float


@torch.inference_mode()
def quantize(
    model: LayeredModel,
    scheme: Scheme,
    calibration: Tensor,
    evaluation: Tensor,
    writer: FolderWriter,
    on_layer: Callable[[], None],
) -> Perplexities:
    """Write the tensors of a model with its products rounded; return what that costs.

    calibration  [windows, tokens]: the text that weights are rounded by
    evaluation   [windows, tokens]: the text of the perplexity
    on_layer     called where a layer is done
    """
    before = [model.states(window) for window in evaluation]
    after = list(before)
    states = [model.states(window) for window in calibration] if scheme.reads_inputs else []
    for index in range(model.num_layers):
        layer, run = model.load(index), model.run(index)
        _pass(before, run)
        weights = _round(layer, states, run, scheme, model.dtype)
        for name, tensor in _tensors(model.layer_name(index), layer, weights, scheme):
            writer.add(name, tensor)
        _pass(states, run)
        hooks = _round_rows(layer, scheme)
        _pass(after, run)
        for hook in hooks:
            hook.remove()
        model.unload(index)
        on_layer()
    for name, tensor in model.rest():
        writer.add(name, tensor)
    return Perplexities(
        _perplexity(model, evaluation, before), _perplexity(model, evaluation, after)
    )


def _pass(states: list[Tensor], run: Run) -> None:
    """Put what a layer gives in the place of what it is given, window by window."""
    for at in range(len(states)):
        states[at] = run(states[at])


def _round(
    layer: nn.Module, states: Sequence[Tensor], run: Run, scheme: Scheme, dtype: torch.dtype
) -> dict[str, Rounded]:
    """Return the rounded weights of a layer's products, which it computes with from now on."""
    inputs = inputs_of(layer, states, run) if scheme.reads_inputs else []
    if scheme.method == "awq":
        scale_layer(layer, inputs, states[0], run, scheme)
    hessians = {name: group.hessian for group in inputs for name in group.readers}
    weights = {}
    for name, product in products_of(layer).items():
        if scheme.method == "gptq":
            weights[name] = gptq(product.weight, hessians[name], scheme, dtype)
        else:
            weights[name] = rounded(product.weight, scheme, dtype)
        product.weight = nn.Parameter(weights[name].dense().to(dtype), requires_grad=False)
    return weights


def _tensors(
    layer_name: str, layer: nn.Module, weights: dict[str, Rounded], scheme: Scheme
) -> list[tuple[str, Tensor]]:
    """Return the tensors of a layer as they are written, by their names in the folder."""
    tensors: list[tuple[str, Tensor]] = []
    for name, parameter in layer.named_parameters():
        module = name.removesuffix(".weight")
        if module in weights and name.endswith(".weight"):
            whole = compressed(weights[module], scheme, parameter.dtype)
            tensors += [(f"{layer_name}.{module}.{end}", part) for end, part in whole.items()]
        else:
            tensors.append((f"{layer_name}.{name}", parameter))
    return tensors


def _round_rows(layer: nn.Module, scheme: Scheme) -> list[torch.utils.hooks.RemovableHandle]:
    """Have products round what they multiply, where those who serve the folder do."""
    if not scheme.rounds_rows:
        return []

    def round_rows(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded_rows(args[0], scheme),)

    return [
        product.register_forward_pre_hook(round_rows) for product in products_of(layer).values()
    ]


def _perplexity(model: LayeredModel, windows: Tensor, states: Sequence[Tensor]) -> float:
    losses = [
        F.cross_entropy(model.logits(window, last)[:-1].float(), window[1:].to(last.device))
        for window, last in zip(windows, states, strict=True)
    ]
    return math.exp(torch.stack(losses).mean())
