"""The table of rotary positions (RoPE), computed once for a model."""

import torch
from torch import Tensor

from penstock.kernels.cache.rotate_and_store import Rotation

_FIRST_ROWS = 1024


class RotaryTable:
    """The cosines and sines [positions, head_dim] of the rotations, for `kernels.rows.rotary`.

    It grows to as many positions as are asked for.
    """

    def __init__(self, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype) -> None:
        """Begin without a row; the first step computes some.

        inv_freq is [head_dim / 2] float32, 0 where nothing is turned; attention_factor scales what
        is turned of queries and keys (yarn).
        """
        self._inv_freq = inv_freq
        self._attention_factor = attention_factor
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0)

    @property
    def num_positions(self) -> int:
        return len(self._cos)

    def cover(self, num_positions: int) -> None:
        """Extend the table to at least `num_positions`.

        A step extends it too, while its sequences wait. Rows that are there keep their bits.
        """
        if num_positions <= len(self._cos):
            return
        count = max(num_positions, 2 * len(self._cos), _FIRST_ROWS)
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = torch.outer(positions, self._inv_freq)
        factors = torch.where(self._inv_freq == 0, 1.0, self._attention_factor)
        cos, sin = angles.cos() * factors, angles.sin() * factors
        self._cos = torch.cat((cos, cos), 1).to(self._dtype)
        self._sin = torch.cat((-sin, sin), 1).to(self._dtype)

    def rows(self, positions: Tensor, num_positions: int) -> Rotation:
        """Return the rotation of `positions`, which are all below `num_positions`."""
        self.cover(num_positions)
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        return Rotation(cos, sin)
