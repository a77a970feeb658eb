"""Tells on which device a tensor lies, for the other modules of `kernels`."""

import ctypes
import os

import torch
from torch import Tensor

from penstock.kernels.cpu.library import compiled_ops

# The interpreter computes bf16 on raw 16-bit integers, so products in it are of float32.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The types of device that Triton's kernels are for. Its interpreter runs them on "cpu" too.
TRITON_DEVICES = {"cuda"}


def runs_triton(device: torch.device) -> bool:
    return device.type in TRITON_DEVICES


def on_gpu(x: Tensor) -> bool:
    return runs_triton(x.device)


def ops_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the compiled operations if they work on such tensors, which are bf16 on a CPU.

    Return None otherwise.
    """
    on_cpu = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return compiled_ops() if on_cpu else None
