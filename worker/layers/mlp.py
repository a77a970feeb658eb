"""The gated feed-forward layer."""

from torch import Tensor

from penstock.worker.layers.linear import Linear


class GatedMLP:
    """The gated feed-forward layer: x [tokens, hidden] -> [tokens, hidden].

    Gate and up are one product.
    """

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down.add(self.gate_up.silu_mul(x), residual)
