"""The KV cache in 8 bits, and where it can be kept so."""

from collections.abc import Mapping

import torch

from penstock.kernels.numbers.device import runs_triton
from penstock.kernels.numbers.eight_bits import row_width
from penstock.kernels.numbers.fp8 import FP8
from penstock.worker.layers.choices import KvCacheDtype

__all__ = ["KV_DTYPES", "cannot_keep", "row_width"]

KV_DTYPES: Mapping[KvCacheDtype, torch.dtype] = {"fp8": FP8, "fp8_e4m3": FP8, "int8": torch.int8}
_LEAST = (8, 9)  # capability of a GPU that converts fp8


def cannot_keep(dtype: torch.dtype, device: torch.device, model_dtype: torch.dtype) -> str | None:
    """Return why the device keeps no keys and values so, of a model of this type; else None."""
    if not runs_triton(device):
        if model_dtype == torch.bfloat16:
            return None
        name = str(model_dtype).removeprefix("torch.")
        return (
            f"on a CPU it is for models computed in bfloat16, and this one is in {name}; "
            "give dtype bfloat16, or leave it out"
        )
    if dtype != FP8:
        return "a GPU's attention does not read it; give fp8, or leave it out"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST:
        name = torch.cuda.get_device_name(device)
        return f"a {name} cannot convert it; that takes a GPU of capability 8.9"
    return None
