"""The inputs of a layer's products: who reads the same ones, where they come from, their sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.worker.models.folder.errors import UnsupportedModel

Run = Callable[[Tensor], Tensor]  # a layer's pass over the states of one window


@dataclass(slots=True)
class Inputs:
    """The inputs that several products of a layer share.

    readers    the names of the products
    norm       the name of the norm that these come out of; None where none does
    hessian    [columns, columns] float32: the mean over tokens of x^T x
    magnitude  [columns] float32: the mean over tokens of |x|
    """

    readers: list[str]
    norm: str | None
    hessian: Tensor
    magnitude: Tensor
    num_tokens: int = 0

    def add(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Count the tokens of a pass; it is a hook before a product."""
        rows = args[0].reshape(-1, args[0].shape[-1]).float()
        self.hessian += rows.T @ rows
        self.magnitude += rows.abs().sum(0)
        self.num_tokens += len(rows)


def products_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """Return the products of a layer, by their names in it."""
    modules = layer.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def inputs_of(layer: nn.Module, windows: Sequence[Tensor], run: Run) -> list[Inputs]:
    """Return the inputs of all products of a layer, in the order in which they are read.

    Raises UnsupportedModel where a product is passed by.

    windows  the states that go into the layer
    """
    inputs = _readers(layer, windows[0], run)
    hooks = [
        layer.get_submodule(group.readers[0]).register_forward_pre_hook(group.add)
        for group in inputs
    ]
    for states in windows:
        run(states)
    for hook in hooks:
        hook.remove()
    for group in inputs:
        group.hessian /= group.num_tokens
        group.magnitude /= group.num_tokens
    return inputs


def _readers(layer: nn.Module, states: Tensor, run: Run) -> list[Inputs]:
    """Return inputs without their sums: products that are given one tensor read the same."""
    products, reads, norms = products_of(layer), dict[str, Tensor](), dict[str, Tensor]()

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle | None:
        if name in products:
            return module.register_forward_pre_hook(lambda _, args: reads.update({name: args[0]}))
        if getattr(getattr(module, "weight", None), "ndim", 0) == 1:
            return module.register_forward_hook(lambda _, __, x: norms.update({name: x}))
        return None

    hooks = [hook for name, module in layer.named_modules() if (hook := watch(name, module))]
    run(states)
    for hook in hooks:
        hook.remove()
    if idle := products.keys() - reads.keys():
        raise UnsupportedModel(
            f"{min(idle)} of a layer is never multiplied; it cannot be quantised"
        )
    inputs: list[Inputs] = []
    for name, x in reads.items():
        group = next((group for group in inputs if reads[group.readers[0]] is x), None)
        if group:
            group.readers.append(name)
            continue
        norm = next((name for name, states in norms.items() if states is x), None)
        hessian = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
        inputs.append(Inputs([name], norm, hessian, torch.zeros(x.shape[-1], device=x.device)))
    return inputs
