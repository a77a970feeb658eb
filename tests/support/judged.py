"""Operations as transformers has them, in float64."""

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from penstock.kernels.rows.activation import Activation

_THEIRS = {
    "silu_mul": "silu",
    "gelu_mul": "gelu_pytorch_tanh",
    "gelu": "gelu_pytorch_tanh",
    "relu2": "relu2",
}


def activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "clamped_mul":
        in_turns = torch.stack(x.double().chunk(2, -1), -1).flatten(-2)
        return GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), in_turns)
    act = ACT2FN[_THEIRS[activation]]
    if not activation.endswith("_mul"):
        return act(x.double())
    gate, up = x.double().chunk(2, -1)
    return act(gate) * up
