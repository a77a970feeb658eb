"""Products of few bf16 rows with a weight of 8 or 4 bits (W8A16, W4A16) on a GPU.

The weight is read as it is kept.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.device import INTERPRETED

TILE_COLUMNS = 32  # columns of a program's tile: with few rows a product wants many programs
STEP_DEPTH = 128  # inner numbers of a step, with 8 bits; with 4 bits a group
_LEAST_ROWS, _MOST_ROWS = 16, 64  # rows of a tile


def quantised_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    *,
    factor: float = 1.0,
    adds: bool = False,
    tile_rows: int | None = None,
) -> Tensor:
    """Compute (x @ weight.T + bias) * factor, or add it to `out`; return `out`.

    x          [rows, in_features] bf16, contiguous
    bias       [out_features]
    out        [rows, out_features] bf16 or float32, contiguous
    tile_rows  rows of a program's tile; None: as few as the rows need
    """
    rows, scales = len(x), weight.scales
    assert scales is not None, "a dense weight has another product"
    if tile_rows is None:
        tile_rows = min(_MOST_ROWS, max(_LEAST_ROWS, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(weight.out_features, TILE_COLUMNS))
    _quantised_product[grid](
        x,
        weight.numbers,
        scales,
        bias if bias is not None else scales,
        out,
        rows,
        factor,
        OUTER=weight.out_features,
        INNER=weight.in_features,
        BITS=weight.bits,
        GROUP=weight.group,
        GROUPS=scales.shape[1],
        HAS_BIAS=bias is not None,
        ADDS=adds,
        ROWS=tile_rows,
        COLUMNS=TILE_COLUMNS,
        DEPTH=STEP_DEPTH,
        IS_INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit
def _quantised_product(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    factor,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    # The interpreter has no bf16.
    NARROW: tl.constexpr = tl.float32 if IS_INTERPRETED else tl.bfloat16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUTER
    x_rows = x_ptr + row.to(tl.int64)[:, None] * INNER
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if BITS == 8:
        depth = tl.arange(0, DEPTH)
        numbers = numbers_ptr + column.to(tl.int64)[None, :] * INNER + depth[:, None]
        for begin in range(0, INNER, DEPTH):
            inside = depth < INNER - begin
            x = tl.load(
                x_rows + begin + depth[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
            )
            number = tl.load(numbers + begin, mask=is_column[None, :] & inside[:, None], other=0)
            sums = tl.dot(x.to(NARROW), number.to(NARROW), sums, input_precision="ieee")
        scale = tl.load(scales_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        sums *= scale[None, :]
    else:
        sums = add_four_bits(
            sums, x_rows, is_row, numbers_ptr, scales_ptr, column, is_column,
            INNER, GROUP, GROUPS, IS_INTERPRETED,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sums *= factor
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * OUTER + column[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    if ADDS:
        sums += tl.load(out_ptrs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def add_four_bits(
    sums,
    x_rows,
    is_row,
    numbers_ptr,
    scales_ptr,
    column,
    is_column,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Return the sums plus rows by some columns of a weight of 4 bits.

    sums    [rows, columns] float32
    x_rows  [rows, 1] pointers at their first numbers
    column  [columns] int32
    """
    NARROW: tl.constexpr = tl.float32 if IS_INTERPRETED else tl.bfloat16
    HALF: tl.constexpr = GROUP // 2
    depth = tl.arange(0, HALF)
    bytes_ptr = numbers_ptr + column.to(tl.int64)[None, :] * (GROUPS * HALF) + depth[:, None]
    for group in range(GROUPS):
        byte = tl.load(bytes_ptr + group * HALF, mask=is_column[None, :], other=0)
        low = ((byte & 15).to(tl.int32) - 8).to(NARROW)
        high = ((byte >> 4).to(tl.int32) - 8).to(NARROW)
        at = group * GROUP + depth
        x_low = tl.load(
            x_rows + at[None, :], mask=is_row[:, None] & (at < INNER)[None, :], other=0.0
        )
        at += HALF
        x_high = tl.load(
            x_rows + at[None, :], mask=is_row[:, None] & (at < INNER)[None, :], other=0.0
        )
        part = tl.dot(x_low.to(NARROW), low, input_precision="ieee")
        part = tl.dot(x_high.to(NARROW), high, part, input_precision="ieee")
        scale = tl.load(scales_ptr + column * GROUPS + group, mask=is_column, other=0.0)
        sums += part * scale.to(tl.float32)[None, :]
    return sums
