"""The rotation of every position, computed once for a model."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos, sin [max_positions, head_dim], as `kernels.rotary` wants them."""

    cos: Tensor
    sin: Tensor

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotary_table(
    inv_freq: Tensor, attention_factor: float, max_positions: int, dtype: torch.dtype
) -> RotaryTable:
    """inv_freq [head_dim / 2] float32; attention_factor scales queries and keys (yarn)."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return RotaryTable(torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype))
