"""The KV cache in FP8, and where it can be kept so."""

import torch

from penstock.kernels.numbers.device import runs_triton
from penstock.kernels.numbers.fp8 import FP8

__all__ = ["FP8", "cannot_keep"]

_LEAST = (8, 9)  # capability of a GPU that converts them


def cannot_keep(device: torch.device) -> str | None:
    """Return why the device keeps no keys and values of eight bits; None where it does."""
    if not runs_triton(device):
        return "only a GPU's attention reads it; leave it out on a CPU"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST:
        name = torch.cuda.get_device_name(device)
        return f"a {name} cannot convert it; that takes a GPU of capability 8.9"
    return None
