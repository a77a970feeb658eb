"""RMSNorm and LayerNorm: normalisation of each row, scaled by a learned weight.

x         [..., hidden]   any float dtype, contiguous
returns   [..., hidden]   dtype of x; the sums are float32
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.numbers.device import on_gpu, ops_for


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """One norm: by the root of the mean square, or of the variance.

    weight   [hidden]  float32, or x's dtype where rows are not normalised by compiled code
    bias     [hidden]  in the weight's dtype; None means none
    centers  the mean is taken away first (LayerNorm)
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centers: bool = False


class PackedNorm(ctypes.Structure):
    """A norm as compiled code reads it; the weights' memory must outlive it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("centers", ctypes.c_int),
    )


def packed_norm(norm: NormWeights | None) -> PackedNorm:
    """Return the norm for compiled code, to which no norm is one without a weight."""
    if norm is None:
        return PackedNorm()
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return PackedNorm(norm.weight.data_ptr(), bias, norm.eps, norm.centers)


def normalise(x: Tensor, norm: NormWeights) -> Tensor:
    if on_gpu(x) and x.is_contiguous():
        return _on_gpu(x, norm, torch.empty_like(x))
    ops = _ops(x, norm)
    if ops is None:
        return normalise_ref(x, norm)
    return normalise_compiled(ops, x, norm, torch.empty_like(x))


def add_normalised(x: Tensor, norm: NormWeights, residual: Tensor) -> Tensor:
    """Return residual plus the normalised x; residual, contiguous, may be overwritten."""
    if on_gpu(x) and x.is_contiguous():
        return _on_gpu(x, norm, residual, adds=True)
    ops = _ops(x, norm)
    if ops is None:
        return residual + normalise_ref(x, norm)
    return normalise_compiled(ops, x, norm, residual, adds=True)


def normalise_ref(x: Tensor, norm: NormWeights) -> Tensor:
    wide = x.to(norm.weight.dtype)  # float32 where the weight does not fit x's type
    if norm.centers:
        done = F.layer_norm(wide, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    else:
        done = F.rms_norm(wide, norm.weight.shape, norm.weight, norm.eps)
        done = done if norm.bias is None else done + norm.bias
    return done.to(x.dtype)


def normalise_compiled(
    ops: ctypes.CDLL, x: Tensor, norm: NormWeights, out: Tensor, *, adds: bool = False
) -> Tensor:
    """Normalise x, bf16, in compiled code, into out or added to it.

    Both have rows of unit stride, as far apart in the one as in the other.
    """
    hidden = x.shape[-1]
    # A dimension of one may have any stride.
    stride = hidden if x.is_contiguous() else x.stride(-2)
    ops.norm(
        x.data_ptr(),
        ctypes.byref(packed_norm(norm)),
        out.data_ptr(),
        adds,
        x.numel() // hidden,
        hidden,
        stride,
    )
    return out


def _on_gpu(x: Tensor, norm: NormWeights, out: Tensor, *, adds: bool = False) -> Tensor:
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.rows.norm_triton import normalise_triton

    return normalise_triton(x, norm.weight, norm.bias, norm.eps, norm.centers, out, adds=adds)


def _ops(x: Tensor, norm: NormWeights) -> ctypes.CDLL | None:
    fits = x.is_contiguous() and norm.weight.dtype == torch.float32
    return ops_for(x) if fits else None
