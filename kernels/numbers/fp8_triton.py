"""Rows in FP8 on a GPU, and how a kernel converts to it."""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.numbers.device import INTERPRETED


def quantise_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `kernels.numbers.fp8.quantise_rows` says; a program takes one row."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        _quantise_rows[(rows,)](
            x,
            out,
            scales,
            WIDTH=width,
            BLOCK=block,
            IS_INTERPRETED=INTERPRETED,
            num_warps=min(16, max(1, block // 512)),
        )
    return out, scales


@triton.jit
def _quantise_rows(
    x_ptr,
    out_ptr,
    scales_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    scale = tl.where(most == 0, 1.0, most / 448.0)
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + column, to_fp8(x / scale, IS_INTERPRETED), mask=inside)


@triton.jit
def to_fp8(x, IS_INTERPRETED: tl.constexpr):
    """Return float32 numbers in fp8, rounded to the nearest, and to even between two."""
    x = tl.where(x > 448, 448.0, tl.where(x < -448, -448.0, x))  # and no number stays none
    if IS_INTERPRETED:
        # It loses a carry into the exponent, so what it converts is rounded beforehand.
        size = tl.maximum(tl.abs(x), 0.015625)  # below it all have the exponent of 2**-6
        step = tl.exp2(tl.floor(tl.log2(size)) - 3)
        x = ((x / step + 12582912.0) - 12582912.0) * step  # 1.5 * 2**23 leaves no fraction
    return x.to(tl.float8e4nv)
