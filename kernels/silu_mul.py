"""The gate of a feed-forward layer: silu of the first half of each row times the second half.

gate_up   [tokens, 2 * hidden]
returns   [tokens, hidden]       contiguous
"""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    return silu_mul_ref(gate_up)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul_rowwise(gate_up: Tensor) -> Tensor:
    """Compute the gate with the same bits for a row whatever rows come with it.

    `F.silu` rounds differently at the end of a vector or of a thread's share; `exp` and quotients
    do not.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    return (wide / wide.neg().exp_().add_(1)).to(gate_up.dtype).mul_(up)
