"""Mixture of experts (MoE): a feed-forward layer whose experts a router chooses for each token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.linear.choose import ExpertChoice, choose
from penstock.kernels.linear.experts import PanelExperts, experts_ref
from penstock.kernels.linear.panel_linear import PanelLinear
from penstock.kernels.numbers.device import on_gpu
from penstock.worker.layers.fp8_linear import FP8, Fp8Linear
from penstock.worker.layers.linear import Linear, TorchLinear
from penstock.worker.layers.mlp import MLP

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

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self._gate.wide(x), self._choice, self._bias)


class Experts:
    """A mixture of experts: x [tokens, hidden] -> [tokens, hidden].

    shared  what every token goes through besides
    gate    one number a token, whose sigmoid is the share of that; None means 1
    """

    def __init__(
        self, router: Router, experts: list[MLP], shared: MLP | None, gate: Linear | None
    ) -> None:
        self._router = router
        self._shared = shared
        self._gate = gate
        self._together = _together(experts)
        self._experts = experts if self._together is None else []

    @property
    def is_capturable(self) -> bool:
        """Return whether it waits for nothing on the host, whatever is chosen."""
        return not self._experts

    def __call__(self, x: Tensor) -> Tensor:
        return self.add(x, torch.zeros_like(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the result plus residual, which may be overwritten."""
        chosen, shares = self._router(x)
        if self._together is not None:
            residual = self._together.add(x, chosen, shares, residual)
        else:
            residual = residual + experts_ref(x, self._experts, chosen, shares)
        if self._shared is None:
            return residual
        if self._gate is None:
            return self._shared.add(x, residual)
        # As here `exp` and quotients give a row the same bits whatever rows come with it.
        share = 1 / (1 + self._gate.wide(x).neg().exp())
        return residual + self._shared(x) * share.to(x.dtype)


def _together(experts: list[MLP]) -> "PanelExperts | ExpertsOnGpu | None":
    up = [each.up for each in experts if isinstance(each.up, PanelLinear)]
    down = [each.down for each in experts if isinstance(each.down, PanelLinear)]
    if len(up) == len(down) == len(experts):
        return PanelExperts(up[0].ops, up, down)
    return _on_gpu(experts)


def _on_gpu(experts: list[MLP]) -> "ExpertsOnGpu | None":
    """Stack the weights of experts on a GPU. None where they are elsewhere, or have biases."""
    up, down = _stacked([each.up for each in experts]), _stacked([each.down for each in experts])
    first, last = experts[0].up, experts[0].down
    known = TorchLinear | Fp8Linear
    if up is None or down is None or not (isinstance(first, known) and isinstance(last, known)):
        return None
    assert first.activation is not None
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.linear.experts_triton import ExpertsOnGpu

    scales = None if up[1] is None or down[1] is None else (up[1], down[1])
    return ExpertsOnGpu(up[0], down[0], first.activation, last.factor, last.deterministic, scales)


def _stacked(products: list[Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Return weights [products, outer, inner], and scales [products, outer] if they are of fp8."""
    whole = [each for each in products if isinstance(each, TorchLinear) and each.bias is None]
    weights = [each.weight for each in whole if each.weight is not None]
    if len(weights) == len(products):
        return (torch.stack(weights), None) if on_gpu(weights[0]) else None
    eights = [each for each in products if isinstance(each, Fp8Linear) and each.bias is None]
    if len(eights) < len(products):
        return None
    out = eights[0].out_features
    numbers = torch.stack([each.numbers[:out].view(torch.uint8) for each in eights])
    return numbers.view(FP8), torch.stack([each.scales[:out, 0] for each in eights])
