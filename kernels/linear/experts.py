"""A mixture of experts (MoE): each row goes through a few of many feed-forward layers.

    x           [tokens, hidden]
    expert_ids  [tokens, num_chosen] int32; numbers of experts, none twice in a row
    shares      [tokens, num_chosen] float32
    returns     [tokens, hidden]: the sum of what the chosen experts make of a row, by their shares

Experts that nobody chose are not read.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import PackedWeight, PanelWeight

_ROWS = 1024  # in one call

# One expert: x [rows, hidden] -> [rows, hidden]
Expert = Callable[[Tensor], Tensor]


def experts_ref(x: Tensor, experts: Sequence[Expert], expert_ids: Tensor, shares: Tensor) -> Tensor:
    """Compute the rows of each expert together. It waits for the device."""
    pairs = expert_ids.flatten().to(torch.int64)
    order = pairs.argsort(stable=True)
    rows = x[order // expert_ids.shape[1]]
    ends = list(accumulate(pairs.bincount(minlength=len(experts)).tolist()))
    outputs = torch.empty_like(rows)
    for expert, start, end in zip(experts, [0, *ends], ends, strict=False):
        if end > start:
            outputs[start:end] = expert(rows[start:end])
    of_tokens = torch.empty_like(outputs)
    of_tokens[order] = outputs
    terms = of_tokens.view(*expert_ids.shape, -1) * shares[..., None]  # float32
    return terms.sum(1).to(x.dtype)


class PanelExperts:
    """A mixture of experts in compiled code, which works on bf16 rows.

    up, down  the weights of each expert; all have one shape, and the first one activation
    """

    def __init__(self, up: list[PanelWeight], down: list[PanelWeight]) -> None:
        self._ops = up[0].ops
        self._weights = up, down  # kept, since the compiled call reads their memory
        self._up = (PackedWeight * len(up))(*[weight.layout for weight in up])
        self._down = (PackedWeight * len(down))(*[weight.layout for weight in down])
        self._experts = _Experts(self._up, self._down, len(up), up[0].activation)

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor) -> Tensor:
        return self._run(x, expert_ids, shares, torch.empty_like(x), adds=False)

    def add(self, x: Tensor, expert_ids: Tensor, shares: Tensor, residual: Tensor) -> Tensor:
        """Add the result to residual [tokens, hidden], contiguous, in place; return it."""
        return self._run(x, expert_ids, shares, residual, adds=True)

    def _run(
        self, x: Tensor, expert_ids: Tensor, shares: Tensor, out: Tensor, *, adds: bool
    ) -> Tensor:
        # A few at a time: a row is copied for each of its experts.
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            has_failed = self._ops.experts(
                x[rows].data_ptr(),
                ctypes.byref(self._experts),
                expert_ids[rows].data_ptr(),
                shares[rows].data_ptr(),
                expert_ids.shape[1],
                out[rows].data_ptr(),
                adds,
                len(x[rows]),
            )
            if has_failed:
                raise MemoryError(f"experts found no memory for {len(x[rows])} rows")
        return out


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", ctypes.POINTER(PackedWeight)),
        ("down", ctypes.POINTER(PackedWeight)),
        ("num", ctypes.c_int),
        ("activation", ctypes.c_int),
    )
