"""Copies from the host to the device that the host does not wait for (pinned memory)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, sent by one copy that the host does not wait for.

    On a CPU the tensors are the arrays' own memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(each)) for each in arrays]
    ends = np.cumsum([-(-each.nbytes // _ALIGNED) * _ALIGNED for each in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    starts = [0, *ends[:-1].tolist()]
    for start, each in zip(starts, arrays, strict=True):
        host.numpy()[start : start + each.nbytes].view(each.dtype)[:] = each.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(torch.from_numpy(each[:0]).dtype).view(each.shape)
        for start, each in zip(starts, arrays, strict=True)
    ]
