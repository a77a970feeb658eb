"""The backends of attention: which ones can compute here, and why the others cannot."""

from typing import Literal

import torch

from penstock.kernels.cpu.library import compiled_ops
from penstock.kernels.numbers.device import runs_triton

# triton: kernels for a GPU; compiled: C for a CPU, of bf16; torch: operations of torch, anywhere
Backend = Literal["auto", "triton", "compiled", "torch"]


def backends(device: torch.device, dtype: torch.dtype) -> dict[Backend, str | None]:
    """Return each backend with why it cannot compute there, None where it can.

    What cannot be compiled for a CPU's heads (latents, odd sizes) torch computes.
    """
    why_not = None
    if device.type != "cpu":
        why_not = "it is for a CPU"
    elif dtype != torch.bfloat16:
        why_not = f"it computes in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    elif compiled_ops() is None:
        why_not = "the C code could not be compiled"
    triton = None if runs_triton(device) else "no GPU computes here"
    return {"triton": triton, "compiled": why_not, "torch": None}


def told(reasons: dict[Backend, str | None]) -> str:
    """Say in one line which there are, and why the others are not."""
    there = [name for name, why in reasons.items() if why is None]
    refusals = [f"not {name}: {why}" for name, why in reasons.items() if why is not None]
    return "; ".join([f"there are {' and '.join(there)}", *refusals])
