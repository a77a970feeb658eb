"""The activation between the two products of a feed-forward layer, on a GPU."""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def activate_triton(x: Tensor, activation: str) -> Tensor:
    """Compute x [tokens, width], contiguous, as `kernels.rows.activation` has it."""
    multiplies = activation.endswith("_mul")
    tokens, width = x.shape
    hidden = width // 2 if multiplies else width
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    _activate[(tokens, triton.cdiv(hidden, _BLOCK))](
        x,
        out,
        WIDTH=width,
        HIDDEN=hidden,
        MULTIPLIES=multiplies,
        KIND=activation.removesuffix("_mul"),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _activate(
    x_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        x *= tl.sigmoid(x)
    elif KIND == "clamped":
        x = tl.where(x > 7.0, 7.0, x)
        x *= tl.sigmoid(1.702 * x)
    elif KIND == "gelu":
        x *= tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
        x *= x
    if MULTIPLIES:
        up = tl.load(x_ptr + row * WIDTH + HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == "clamped":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        x *= up
    tl.store(out_ptr + row * HIDDEN + column, x.to(out_ptr.dtype.element_ty), mask=inside)
