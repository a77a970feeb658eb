"""Mixture of experts (MoE): a feed-forward layer whose experts a router chooses for each token."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.linear.choose import ExpertChoice, choose
from penstock.kernels.linear.experts import PanelExperts, experts_ref
from penstock.kernels.linear.weight import Weight, stack
from penstock.kernels.numbers.device import on_gpu
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.products.product import Pass

if TYPE_CHECKING:
    from penstock.kernels.linear.experts_triton import ExpertsOnGpu

__all__ = ["ExpertChoice", "Experts", "Router"]


class Router:
    """Chooses experts: x [tokens, hidden] -> their numbers and shares, [tokens, num_chosen].

    bias  [num_experts] float32, of the scores by which experts are chosen, not of the shares
    """

    def __init__(self, gate: Linear, choice: ExpertChoice, bias: Tensor | None) -> None:
        self._gate = gate
        self._choice = choice
        self._bias = bias

    def __call__(self, x: Tensor, pass_: Pass) -> tuple[Tensor, Tensor]:
        return choose(self._gate.wide(x, pass_), self._choice, self._bias)


class Experts:
    """A mixture of experts: x [tokens, hidden] -> [tokens, hidden].

    shared_mlp  what every token goes through besides
    gate        one number a token, whose sigmoid is the share of that; None means 1
    """

    def __init__(
        self, router: Router, experts: list[MLP], shared_mlp: MLP | None, gate: Linear | None
    ) -> None:
        self._router = router
        self._shared_mlp = shared_mlp
        self._gate = gate
        self._on_cpu = _on_cpu(experts)
        self._on_gpu = None if self._on_cpu else _on_gpu(experts)
        # One by one where their weights are not together: for others these would be kept twice.
        self._apart = [] if self._on_cpu or self._on_gpu else experts

    @property
    def is_capturable(self) -> bool:
        """Return whether it waits for nothing on the host, whatever is chosen."""
        return not self._apart

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        return self.add(x, torch.zeros_like(x), pass_)

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        """Return the result plus residual, which may be overwritten."""
        expert_ids, shares = self._router(x, pass_)
        if self._on_cpu is not None:
            residual = self._on_cpu.add(x, expert_ids, shares, residual)
        elif self._on_gpu is not None:
            residual = self._on_gpu.add(x, expert_ids, shares, residual, pass_.deterministic)
        else:
            experts = [partial(expert, pass_=pass_) for expert in self._apart]
            residual = residual + experts_ref(x, experts, expert_ids, shares)
        if self._shared_mlp is None:
            return residual
        if self._gate is None:
            return self._shared_mlp.add(x, residual, pass_)
        # As here `exp` and quotients give a row the same bits whatever rows come with it.
        share = 1 / (1 + self._gate.wide(x, pass_).neg().exp())
        return residual + self._shared_mlp(x, pass_) * share.to(x.dtype)


def _on_cpu(experts: list[MLP]) -> PanelExperts | None:
    up = [expert.up.panels for expert in experts if expert.up.panels is not None]
    down = [expert.down.panels for expert in experts if expert.down.panels is not None]
    return PanelExperts(up, down) if len(up) == len(down) == len(experts) else None


def _on_gpu(experts: list[MLP]) -> "ExpertsOnGpu | None":
    """Stack the weights of experts on a GPU. None where they are elsewhere."""
    ups, downs = [expert.up for expert in experts], [expert.down for expert in experts]
    up, down = _stacked(ups), _stacked(downs)
    if up is None or down is None:
        return None
    activation = experts[0].up.activation
    assert activation is not None, "it stands between the two"
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.linear.experts_triton import ExpertsOnGpu

    return ExpertsOnGpu(up, down, activation, downs[0].factor, _biases(ups), _biases(downs))


def _stacked(products: list[Linear]) -> Weight | None:
    weights = [product.weight for product in products if product.weight is not None]
    is_there = len(weights) == len(products) and on_gpu(weights[0].numbers)
    return stack(weights) if is_there else None


def _biases(products: list[Linear]) -> Tensor | None:
    """Return the biases of all products in one tensor; all have one, or none has."""
    biases = [product.bias for product in products if product.bias is not None]
    return torch.stack(biases) if biases else None
