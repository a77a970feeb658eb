"""RoPE: rotates heads by their positions, neox style, the first half against the second half.

x         [tokens, heads, head_dim]   queries and keys may be in one tensor
cos, sin  [tokens, head_dim]          sin's first half negated, so that the rotation is
                                      x * cos + roll(x, head_dim / 2) * sin
returns   [tokens, heads, head_dim]   contiguous, dtype of x
"""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary_ref(x, cos, sin)


def rotary_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    sin_part = torch.roll(x, half, -1).mul_(sin[:, None])
    return (x * cos[:, None]).add_(sin_part)
