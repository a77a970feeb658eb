"""The one place of this room that asks where a tensor lives."""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.cpu.library import compiled_ops


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def ops_for(x: Tensor) -> ctypes.CDLL | None:
    """The compiled operations, where they compute on such tensors: bf16 of a CPU."""
    on_cpu = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return compiled_ops() if on_cpu else None
