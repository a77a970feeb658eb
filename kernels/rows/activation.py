"""The activation of a feed-forward layer, between its two products.

    silu_mul, gelu_mul  rows are [gate, up]: silu or gelu of the gate, times up (SwiGLU, GeGLU)
    clamped_mul         gpt-oss's: the gate's swish, by one more than up; both are within LIMIT
    gelu, relu2         for each number; relu2 is the square of what is above 0

x         [tokens, hidden], or [tokens, 2 * hidden] for those that multiply
returns   [tokens, hidden], contiguous

gelu is the one by tanh, which is what nearly all models have.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.numbers.device import on_gpu

Activation = Literal["silu_mul", "gelu_mul", "clamped_mul", "gelu", "relu2"]

# Constants of clamped_mul: the most that a gate is, and up either way; the swish is of 1.702 gates.
LIMIT, SWISH = 7.0, 1.702
_PER_SIGMOID = 1.5957691216  # gelu(x) = x * sigmoid(this * (x + 0.044715 * x ** 3))


def num_parts(activation: Activation) -> int:
    """Return how many products an activation makes one of."""
    return 2 if activation.endswith("_mul") else 1


def activate(x: Tensor, activation: Activation) -> Tensor:
    return _on_gpu(x, activation) if on_gpu(x) else activate_ref(x, activation)


def _on_gpu(x: Tensor, activation: Activation) -> Tensor:
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.rows.activation_triton import activate_triton

    return activate_triton(x, activation)


def activate_ref(x: Tensor, activation: Activation) -> Tensor:
    if activation == "relu2":
        return F.relu(x).square_()
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, -1)
    if activation == "clamped_mul":
        gate = gate.clamp(max=LIMIT)
        return torch.sigmoid(SWISH * gate).mul_(gate).mul_(up.clamp(-LIMIT, LIMIT) + 1)
    out = F.silu(gate) if activation == "silu_mul" else F.gelu(gate, approximate="tanh")
    return out.mul_(up)


def activate_rowwise(x: Tensor, activation: Activation) -> Tensor:
    """Activate with the same bits for a row whatever rows come with it.

    `F.silu` and `F.gelu` round differently at the end of a vector or of a thread's share; `exp`
    and quotients do not.
    """
    if on_gpu(x):
        return _on_gpu(x, activation)
    if activation == "relu2":
        return activate_ref(x, activation)
    gate, *up = x.chunk(num_parts(activation), -1)
    wide = gate.float()
    if activation == "clamped_mul":
        wide, up = wide.clamp(max=LIMIT), [up[0].clamp(-LIMIT, LIMIT) + 1]
    done = (wide / _power(wide, activation).neg().exp_().add_(1)).to(x.dtype)
    return done.mul_(up[0]) if up else done


def _power(x: Tensor, activation: Activation) -> Tensor:
    """Return that of which the sigmoid is the share of x that is left."""
    if activation == "silu_mul":
        return x.clone()
    if activation == "clamped_mul":
        return x * SWISH
    return (x + 0.044715 * x * x * x) * _PER_SIGMOID
