"""Copies from the host to the device that the host does not wait for (pinned memory)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes


def send(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, sent by one copy that the host does not wait for.

    On a CPU the tensors are the arrays' own memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=True):
        host.numpy()[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
