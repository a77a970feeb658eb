"""The gated feed-forward layer."""

from torch import Tensor

from kernels.silu_mul import silu_mul, silu_mul_rowwise
from worker.layers.linear import Linear


class GatedMLP:
    """x [tokens, hidden] -> [tokens, hidden]; gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, deterministic: bool) -> None:
        self.gate_up = gate_up
        self.down = down
        self.silu_mul = silu_mul_rowwise if deterministic else silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.silu_mul(self.gate_up(x)))
