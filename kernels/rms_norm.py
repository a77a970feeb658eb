"""Root-mean-square normalisation of each row, scaled by a learned weight.

    x         [..., hidden]   any float dtype, unit stride in the last dimension
    weight    [hidden]        dtype of x
    returns   [..., hidden]   dtype of x; the mean is accumulated in float32

`add_rms_norm` first adds a residual [..., hidden] to x, and returns the sum too.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_ref(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm_ref(x, residual, weight, eps)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_ref(total, weight, eps), total
