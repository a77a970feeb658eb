"""Paged attention on a GPU, with a running softmax (FlashAttention, Dao and others, 2022).

A program takes a tile of queries of one sequence, with all heads that share a key head (GQA)
stacked, so that a product has at least the 16 rows that a tensor core wants. It reads key tiles
through the block table; only the tiles at a border of what its queries see are masked. One-token
queries are split along the keys where their programs are too few to fill the device (flash
decoding), and a second kernel merges the parts.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.spans import Scoring, Spans, by_value_scale, with_key_scale
from penstock.kernels.attention.split_keys_triton import (
    NO_KEYS,
    Tile,
    merge,
    num_splits,
    settle,
    shared_bytes,
    weigh,
)
from penstock.kernels.numbers.device import INTERPRETED

_LEAST_COLUMNS = 16  # columns of a product, at least; a head is padded to a power of two
_LEAST_ROWS = 16  # rows of a product, at least

_DECODE = Tile(16, 64, 4, 2)
_WIDE_DECODE = Tile(16, 32, 4, 2)  # for numbers of four bytes, or heads above 128
_PREFILL = Tile(128, 64, 4, 3)
_WIDE_PREFILL = Tile(64, 32, 4, 2)


def paged_attention_triton(
    query: Tensor,
    kv_cache: Tensor,
    spans: Spans,
    scoring: Scoring,
    *,
    deterministic: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute the attention.

    deterministic  use one tile shape and no split, so that a row's bits do not depend on the batch
    tile, splits   None means those that suit the batch
    """
    tokens, heads, head_dim = query.shape
    window = scoring.window
    kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    seqs, group = spans.context_lens.shape[0], heads // kv_heads
    columns = max(_LEAST_COLUMNS, triton.next_power_of_2(head_dim))
    decodes = deterministic or spans.max_query_len == 1
    tile = tile or fitting_tile(decodes, columns * query.element_size(), shared_bytes(query.device))
    if splits is None:
        splits = 1 if deterministic else num_splits(spans, window, kv_heads * seqs, query.device)
    rows = max(tile.rows, triton.next_power_of_2(group))
    kind = torch.float32 if splits > 1 else query.dtype
    out = torch.empty((splits, tokens, heads, head_dim), dtype=kind, device=query.device)
    lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(spans.max_query_len, rows // group) * splits, kv_heads, seqs)
    _paged_attention[grid](
        query,
        kv_cache,
        out,
        lse,
        spans.query_start,
        spans.context_lens,
        spans.block_tables,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        *spans.block_tables.stride(),
        tokens,
        heads,
        with_key_scale(scoring).scale,
        window or 0,
        scoring.softcap or 0.0,
        lse if scoring.sinks is None else scoring.sinks,
        GROUP=group,
        ROWS=rows,
        KEYS=tile.keys,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        SPLITS=splits,
        HAS_WINDOW=window is not None,
        HAS_CAP=scoring.softcap is not None,
        HAS_SINKS=scoring.sinks is not None,
        IS_INTERPRETED=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    result = out[0] if splits == 1 else merge(out, lse, query.dtype)
    return by_value_scale(result, scoring.scales)


def fitting_tile(decodes: bool, row_bytes: int, shared_bytes: int) -> Tile:
    """Return the tile for rows of so many bytes, on processors that share so many bytes each.

    The queries lie there, and keys and values for each stage. Where that is too much there are
    fewer stages, then fewer keys, then fewer rows.
    """
    if decodes:
        tile = _DECODE if row_bytes <= 256 else _WIDE_DECODE
    else:
        tile = _PREFILL if row_bytes <= 256 else _WIDE_PREFILL
    while (tile.rows + 2 * tile.keys * tile.num_stages) * row_bytes > shared_bytes:
        if tile.num_stages > 1:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.keys > _LEAST_ROWS:
            tile = tile._replace(keys=tile.keys // 2)
        elif tile.rows > _LEAST_ROWS:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


@triton.jit
def _paged_attention(
    query_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    context_lens_ptr,
    tables_ptr,
    query_row,
    query_head,
    cache_block,
    cache_head,
    cache_value,
    tables_row,
    tables_column,
    tokens,
    heads,
    scale,
    window,
    softcap,
    sinks_ptr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634  # exp2 is the instruction that the hardware has
    # The last tiles see the most keys, so they come first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // SPLITS
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - start
    context = tl.load(context_lens_ptr + seq)
    if tile * QUERIES >= query_len:
        return

    row = tl.arange(0, ROWS)
    token = tile * QUERIES + row // GROUP
    live = (row < QUERIES * GROUP) & (token < query_len)
    head = kv_head * GROUP + row % GROUP
    # int64 before it meets a stride: long batches and caches have more than 2**31 elements.
    token_row = (start + token).to(tl.int64)
    place = (split.to(tl.int64) * tokens + token_row) * heads + head

    before = context - query_len  # tokens before the slice
    end = tl.minimum(context, before + (tile + 1) * QUERIES)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, before + tile * QUERIES - window + 1) // KEYS * KEYS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - first, SPLITS), KEYS) * KEYS
        first = first + split * share
        end = tl.minimum(end, first + share)
        if (split > 0) & (first >= end):  # a part without keys
            tl.store(lse_ptr + place, tl.full([ROWS], NO_KEYS, tl.float32), mask=live)
            return

    column = tl.arange(0, COLUMNS)
    live_columns = live[:, None]
    if COLUMNS != HEAD_DIM:
        live_columns = live_columns & (column < HEAD_DIM)[None, :]
    query = tl.load(
        query_ptr + (token_row * query_row + head * query_head)[:, None] + column[None, :],
        mask=live_columns,
        other=0.0,
    )
    if IS_INTERPRETED:
        query = query.to(tl.float32)

    top = tl.full([ROWS], NO_KEYS, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and split == 0:
        top = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
        total += 1.0
    mix = tl.zeros([ROWS, COLUMNS], tl.float32)
    table = tables_ptr + seq.to(tl.int64) * tables_row
    cache = cache_ptr + kv_head.to(tl.int64) * cache_head
    position = before + token
    # Keys that all queries of the tile see need no mask.
    seen_by_all = tl.minimum(end, before + tile * QUERIES + 1)
    masked_from = first
    if not HAS_WINDOW:
        masked_from = first + tl.maximum(0, seen_by_all - first) // KEYS * KEYS
        for key_start in range(first, masked_from, KEYS):
            top, total, mix = _attend_tile(
                query, top, total, mix, key_start, end, position, table, tables_column,
                cache, cache_block, cache_value, scale, window, softcap,
                KEYS, BLOCK_SIZE, HEAD_DIM, COLUMNS, False, HAS_WINDOW, HAS_CAP, IS_INTERPRETED,
            )  # fmt: skip
    for key_start in range(masked_from, end, KEYS):
        top, total, mix = _attend_tile(
            query, top, total, mix, key_start, end, position, table, tables_column,
            cache, cache_block, cache_value, scale, window, softcap,
            KEYS, BLOCK_SIZE, HEAD_DIM, COLUMNS, True, HAS_WINDOW, HAS_CAP, IS_INTERPRETED,
        )  # fmt: skip

    mix, lse = settle(top, total, mix)
    tl.store(
        out_ptr + place[:, None] * HEAD_DIM + column[None, :],
        mix.to(out_ptr.dtype.element_ty),
        mask=live_columns,
    )
    if SPLITS > 1:
        tl.store(lse_ptr + place, lse, mask=live)


@triton.jit
def _attend_tile(
    query,
    top,
    total,
    mix,
    key_start,
    end,
    position,
    table,
    tables_column,
    cache,
    cache_block,
    cache_value,
    scale,
    window,
    softcap,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Add one tile of keys to a running softmax: its maximum, its sum, and the mixed values."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    key = key_start + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    there = key < end
    if IS_MASKED:
        block = tl.load(table + (key // BLOCK_SIZE) * tables_column, mask=there, other=0)
    else:
        block = tl.load(table + (key // BLOCK_SIZE) * tables_column)
    slot = block.to(tl.int64) * cache_block + (key % BLOCK_SIZE) * HEAD_DIM
    slots = cache + slot[:, None] + column[None, :]
    if IS_MASKED or COLUMNS != HEAD_DIM:
        inside = there[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(slots, mask=inside, other=0.0)
        values = tl.load(slots + cache_value, mask=inside, other=0.0)
    else:
        keys = tl.load(slots)
        values = tl.load(slots + cache_value)
    if IS_INTERPRETED:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    elif keys.dtype != query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    factor = scale * LOG2_E
    if HAS_CAP:
        scores = 2 * tl.sigmoid(2 * scale / softcap * scores) - 1
        factor = softcap * LOG2_E
    if IS_MASKED:
        visible = there[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
    top, total, fade, weight = weigh(scores, top, total, factor)
    mix = tl.dot(weight.to(values.dtype), values, mix * fade[:, None], input_precision="ieee")
    return top, total, mix
