"""RMSNorm and LayerNorm on a GPU; a program takes one row, and reads and writes it once."""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor


def normalise_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    out: Tensor,
    *,
    adds: bool = False,
) -> Tensor:
    """Normalise x into out, or add the result to it; both are contiguous, and may be one tensor.

    weight, bias, eps, centers  as in `kernels.rows.norm.NormWeights`
    """
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    _normalise[(x.numel() // hidden,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        CENTERS=centers,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@triton.jit
def _normalise(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if CENTERS:
        x = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # Rounded before it is added, as an operation of its own would do.
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
        x += tl.load(out_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, x.to(out_ptr.dtype.element_ty), mask=inside)
