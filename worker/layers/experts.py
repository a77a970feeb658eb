"""The feed-forward layer whose experts a router chooses for each token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.choose import ExpertChoice, choose
from penstock.kernels.device import on_gpu
from penstock.kernels.experts import PanelExperts, experts_ref
from penstock.kernels.panel_linear import PanelLinear
from penstock.worker.layers.linear import Linear, TorchLinear
from penstock.worker.layers.mlp import MLP

if TYPE_CHECKING:
    from penstock.kernels.experts_triton import ExpertsOnGpu

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
    up = [each.up for each in experts if isinstance(each.up, TorchLinear)]
    down = [each.down for each in experts if isinstance(each.down, TorchLinear)]
    weights = [each.weight for each in (*up, *down) if each.weight is not None]
    num, is_biased = len(experts), any(each.bias is not None for each in (*up, *down))
    if is_biased or len(weights) < 2 * num or not on_gpu(weights[0]):
        return None
    activation = up[0].activation
    assert activation is not None
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.experts_triton import ExpertsOnGpu

    return ExpertsOnGpu(
        torch.stack(weights[:num]),
        torch.stack(weights[num:]),
        activation,
        down[0].factor,
        down[0].deterministic,
    )
