"""Root-mean-square normalisation of each row, scaled by a learned weight.

x         [..., hidden]   any float dtype, unit stride in the last dimension
weight    [hidden]        dtype of x
returns   [..., hidden]   dtype of x; the mean is accumulated in float32
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.device import ops_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    ops = ops_for(x)
    if ops is not None and x.is_contiguous():
        return rms_norm_compiled(ops, x, weight, eps)
    return rms_norm_ref(x, weight, eps)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_compiled(ops: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x, contiguous bf16, in compiled code."""
    out, hidden = torch.empty_like(x), len(weight)
    ops.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // hidden, hidden, eps)
    return out
