"""A mixture of experts (MoE) on a GPU: grouped products, without waiting for the host.

The rows of each expert are brought together in blocks of equal length, of which the last of an
expert is filled up: a program multiplies one block with a part of its expert's weight. How many
blocks there can be follows from the shapes, so the same launches serve whatever is chosen, in a
CUDA graph too. vLLM's fused kernel lies its rows out so; the idea is of MegaBlocks (T. Gale et al.,
2022, arXiv:2211.15841).
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.linear.quantised_triton import add_four_bits
from penstock.kernels.linear.weight import Weight
from penstock.kernels.numbers.device import INTERPRETED
from penstock.kernels.numbers.fp8 import FP8
from penstock.kernels.numbers.fp8_triton import quantise_rows_triton
from penstock.kernels.rows.activation import Activation
from penstock.kernels.rows.activation_triton import activate_triton

_COLUMNS = 1024  # columns that a program sums up
_TOKENS = 4096  # in one call: a row is copied for each of its experts


class ProductTile(NamedTuple):
    """The part of a product that one program makes, and how deep its steps are."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


SMALL_TILE, LARGE_TILE = ProductTile(16, 64, 128, 4, 4), ProductTile(64, 128, 64, 4, 3)


class ExpertsOnGpu:
    """A mixture of experts by Triton's kernels.

    up         [num_experts, parts * width, hidden], contiguous
    down       [num_experts, hidden, width], contiguous
    factor     by which what an expert makes is multiplied
    up_bias    [num_experts, parts * width], contiguous; and of down [num_experts, hidden]
    """

    def __init__(
        self,
        up: Weight,
        down: Weight,
        activation: Activation,
        factor: float = 1.0,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        self._up, self._up_bias = up, up_bias
        self._down, self._down_bias = down, down_bias
        self._activation = activation
        self._factor = factor

    def add(
        self,
        x: Tensor,
        expert_ids: Tensor,
        shares: Tensor,
        residual: Tensor,
        deterministic: bool = False,
    ) -> Tensor:
        """Add the result to residual [tokens, hidden], contiguous, in place; return it.

        x              [tokens, hidden], contiguous
        expert_ids     [tokens, num_chosen] int32
        shares         [tokens, num_chosen] float32
        deterministic  a row's bits are the same whatever rows come with it
        """
        for start in range(0, len(x), _TOKENS):
            rows = slice(start, start + _TOKENS)
            self._add(x[rows], expert_ids[rows], shares[rows], residual[rows], deterministic)
        return residual

    def _add(
        self, x: Tensor, expert_ids: Tensor, shares: Tensor, residual: Tensor, deterministic: bool
    ) -> None:
        num_experts, num_chosen = len(self._up.numbers), expert_ids.shape[1]
        is_few = deterministic or expert_ids.numel() <= LARGE_TILE.rows * num_experts // 2
        tile = SMALL_TILE if is_few else LARGE_TILE
        blocks = blocks_of(expert_ids, num_experts, tile.rows)
        up = grouped_product(x, self._up, blocks, tile, num_chosen, self._up_bias)
        activations = activate_triton(up, self._activation)
        down = grouped_product(activations, self._down, blocks, tile, 1, self._down_bias)
        tokens, hidden = residual.shape
        _weighed_sum[(tokens, triton.cdiv(hidden, _COLUMNS))](
            down,
            shares,
            residual,
            self._factor,
            HIDDEN=hidden,
            NUM_CHOSEN=num_chosen,
            BLOCK=_COLUMNS,
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows in blocks, each of one expert.

    pairs    [num_blocks * rows] int32: numbers of token and expert, one after the other as they
             were chosen; one past the last fills up
    experts  [num_blocks] int32: each block's expert; one past the last for an empty block
    """

    pairs: Tensor
    experts: Tensor


def blocks_of(expert_ids: Tensor, num_experts: int, rows: int) -> Blocks:
    """Bring the rows of each expert together: expert_ids [tokens, num_chosen] int32."""
    numbers, device = expert_ids.flatten().to(torch.int64), expert_ids.device
    count = len(numbers)
    most = count // rows + min(count, num_experts)  # an expert has at most one block that is short
    order = numbers.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, numbers, torch.ones_like(numbers))
    ends = ((counts + rows - 1) // rows).cumsum(0)
    # Where an expert's rows begin in the blocks, less where they begin in the order.
    shifts = (ends - (counts + rows - 1) // rows) * rows - (counts.cumsum(0) - counts)
    places = torch.arange(count, device=device) + shifts[numbers[order]]
    pairs = torch.full((most * rows,), count, dtype=torch.int32, device=device)
    pairs[places] = order.to(torch.int32)
    experts = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
    return Blocks(pairs, experts.to(torch.int32))


def grouped_product(
    x: Tensor,
    weights: Weight,
    blocks: Blocks,
    tile: ProductTile,
    num_chosen: int,
    biases: Tensor | None = None,
) -> Tensor:
    """Multiply each pair's row with its expert's weight, and add its bias.

    x           [pairs // num_chosen, inner], contiguous; a row serves so many pairs, and is rounded
                to fp8 where the weights are
    weights     [num_experts, outer, inner], contiguous
    biases      [num_experts, outer], contiguous
    returns     [pairs, outer], in the order of the pairs
    """
    numbers, scales, outer = weights.numbers, weights.scales, weights.out_features
    count = len(x) * num_chosen
    out = torch.empty((count, outer), dtype=x.dtype, device=x.device)
    x, of_x = quantise_rows_triton(x) if numbers.dtype == FP8 else (x, None)
    _grouped_product[(len(blocks.experts), triton.cdiv(outer, tile.columns))](
        x,
        numbers,
        out,
        out if of_x is None else of_x,
        out if scales is None else scales,
        out if biases is None else biases,
        blocks.pairs,
        blocks.experts,
        count,
        NUM_EXPERTS=len(numbers),
        OUTER=outer,
        INNER=weights.in_features,
        NUM_CHOSEN=num_chosen,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BITS=weights.bits,
        GROUP=weights.group,
        GROUPS=1 if scales is None else scales.shape[-1],
        HAS_SCALES=scales is not None,
        HAS_BIASES=biases is not None,
        IS_FP8=of_x is not None,
        IS_INTERPRETED=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def _grouped_product(
    x_ptr,
    weights_ptr,
    out_ptr,
    x_scales_ptr,
    scales_ptr,
    biases_ptr,
    pairs_ptr,
    experts_ptr,
    count,
    NUM_EXPERTS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert >= NUM_EXPERTS:
        return
    pairs = tl.load(pairs_ptr + block * ROWS + tl.arange(0, ROWS))
    is_row = pairs < count
    pairs = pairs.to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUTER
    x_rows = x_ptr + (pairs // NUM_CHOSEN)[:, None] * INNER
    scales_ptr += expert * OUTER * GROUPS
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if BITS == 4:
        weight_ptr = weights_ptr + expert * OUTER * (GROUPS * GROUP // 2)
        sums = add_four_bits(
            sums, x_rows, is_row, weight_ptr, scales_ptr, columns, is_column,
            INNER, GROUP, GROUPS, IS_INTERPRETED,
        )  # fmt: skip
    else:
        weight_ptr = weights_ptr + expert * OUTER * INNER
        weight_rows = weight_ptr + columns[None, :].to(tl.int64) * INNER
        sums = _add_numbers(
            sums, x_rows, is_row, weight_rows, is_column, INNER, DEPTH, IS_FP8, IS_INTERPRETED
        )
        if HAS_SCALES:
            factors = _of_columns(scales_ptr + columns, is_column)
            if IS_FP8:
                of_rows = tl.load(x_scales_ptr + pairs // NUM_CHOSEN, mask=is_row, other=0.0)
                factors = of_rows[:, None] * factors
            sums *= factors
    if HAS_BIASES:
        sums += _of_columns(biases_ptr + expert * OUTER + columns, is_column)
    out_ptrs = out_ptr + pairs[:, None] * OUTER + columns[None, :]
    is_out = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _of_columns(ptrs, is_column):
    return tl.load(ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _add_numbers(
    sums,
    x_rows,
    is_row,
    weight_rows,
    is_column,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Return the sums plus rows by some columns of a weight that has a number in each place.

    sums         [rows, columns] float32
    x_rows       [rows, 1] pointers at their first numbers
    weight_rows  [1, columns], as well
    """
    depth = tl.arange(0, DEPTH)
    x_ptrs, weight_ptrs = x_rows + depth[None, :], weight_rows + depth[:, None]
    for begin in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            x = tl.load(x_ptrs + begin, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + begin, mask=is_column[None, :], other=0.0)
        else:
            inside = depth < INNER - begin
            x = tl.load(x_ptrs + begin, mask=is_row[:, None] & inside[None, :], other=0.0)
            is_weight = is_column[None, :] & inside[:, None]
            weight = tl.load(weight_ptrs + begin, mask=is_weight, other=0.0)
        if IS_INTERPRETED:
            x = x.to(tl.float32)
        if IS_FP8:  # sums within a product of FP8 have few bits, so they are short
            sums += tl.dot(x, weight.to(x.dtype), input_precision="ieee")
        else:
            sums = tl.dot(x, weight.to(x.dtype), sums, input_precision="ieee")
    return sums


@triton.jit
def _weighed_sum(
    made_ptr,
    shares_ptr,
    residual_ptr,
    factor,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        share = tl.load(shares_ptr + token * NUM_CHOSEN + number)
        at = (token * NUM_CHOSEN + number) * HIDDEN + column
        total += share * tl.load(made_ptr + at, mask=inside, other=0.0).to(tl.float32)
    at = token * HIDDEN + column
    dtype = residual_ptr.dtype.element_ty
    # The sum is rounded before it is added, as torch does it.
    addend = (total * factor).to(dtype).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, (residual + addend).to(dtype), mask=inside)
