"""Operations as transformers has them, in float64."""

from torch import Tensor
from transformers.activations import ACT2FN

from penstock.kernels.rows.activation import Activation

_THEIRS = {
    "silu_mul": "silu",
    "gelu_mul": "gelu_pytorch_tanh",
    "gelu": "gelu_pytorch_tanh",
    "relu2": "relu2",
}


def activated(x: Tensor, activation: Activation) -> Tensor:
    act = ACT2FN[_THEIRS[activation]]
    if not activation.endswith("_mul"):
        return act(x.double())
    gate, up = x.double().chunk(2, -1)
    return act(gate) * up
