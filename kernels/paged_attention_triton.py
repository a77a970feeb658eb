"""Causal attention over a paged cache on a GPU.

A program takes a tile of queries of one sequence, with all heads that share a key head stacked, so
that a product has at least the 16 rows that a tensor core wants. It reads key tiles through the
block table with a running softmax. One-token queries over long contexts are split along the keys,
and the parts are merged by a second kernel.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.spans import Scoring, Spans

# The interpreter computes bf16 on raw 16-bit integers, so with it everything is float32.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_KEYS = 64
_ROWS = 16
_PREFILL_ROWS = 64
_LEAST_COLUMNS = 16  # of a product; a head's numbers are filled up to a power of two
# Keys of one part of a split query, and the most parts.
_SPLIT_KEYS = 512
_MOST_SPLITS = 16


def paged_attention_triton(
    query: Tensor,
    kv_cache: Tensor,
    spans: Spans,
    scoring: Scoring,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Compute the attention.

    deterministic  use one tile shape and no split, so that a row's bits do not depend on the batch
    """
    tokens, heads, head_dim = query.shape
    window = scoring.window
    splits = 1 if deterministic else _splits(spans, window)
    rows = _ROWS if deterministic or spans.max_query_len == 1 else _PREFILL_ROWS
    out = torch.empty((splits, tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if splits > 1:
        out = out.float()
    lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=query.device)
    kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    group = heads // kv_heads
    rows = max(rows, triton.next_power_of_2(group))
    columns = max(_LEAST_COLUMNS, triton.next_power_of_2(head_dim))
    grid = (
        triton.cdiv(spans.max_query_len, rows // group) * splits,
        kv_heads,
        spans.context_lens.shape[0],
    )
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
        scoring.scale,
        window or 0,
        scoring.softcap or 0.0,
        lse if scoring.sinks is None else scoring.sinks,
        GROUP=group,
        ROWS=rows,
        KEYS=_KEYS,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        SPLITS=splits,
        CAPPED=scoring.softcap is not None,
        HAS_SINKS=scoring.sinks is not None,
        INTERPRETED=_INTERPRETED,
        num_warps=4,
        num_stages=2,
    )
    if splits == 1:
        return out[0]
    merged = torch.empty_like(query, memory_format=torch.contiguous_format)
    _merge[(tokens, heads)](
        out,
        lse,
        merged,
        tokens,
        heads,
        SPLITS=splits,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        num_warps=1,
    )
    return merged


def _splits(spans: Spans, window: int | None) -> int:
    """Return the number of splits: a power of two, more than 1 only for one-token queries."""
    if spans.max_query_len > 1:
        return 1
    seen = min(spans.max_context_len, window or spans.max_context_len)
    wanted = triton.next_power_of_2(triton.cdiv(seen, _SPLIT_KEYS))
    return int(min(_MOST_SPLITS, wanted))


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
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634  # exp2 is the instruction that the hardware has
    tile = tl.program_id(0) // SPLITS
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
    position = context - query_len + token
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, COLUMNS)
    live_columns = live[:, None]
    if COLUMNS != HEAD_DIM:
        live_columns = live_columns & (column < HEAD_DIM)[None, :]
    # int64 before it meets a stride: long batches and caches have more than 2**31 elements.
    token_row = (start + token).to(tl.int64)
    query = tl.load(
        query_ptr + (token_row * query_row + head * query_head)[:, None] + column[None, :],
        mask=live_columns,
        other=0.0,
    )
    if INTERPRETED:
        query = query.to(tl.float32)

    end = tl.minimum(context, context - query_len + (tile + 1) * QUERIES)
    first = 0
    if window > 0:
        first = tl.maximum(0, context - query_len + tile * QUERIES - window + 1) // KEYS * KEYS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - first, SPLITS), KEYS) * KEYS
        first = first + split * share
        end = tl.minimum(end, first + share)

    top = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and split == 0:
        top = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
        total += 1.0
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    table = tables_ptr + seq.to(tl.int64) * tables_row
    scale_log2 = scale * LOG2_E
    for key_start in range(first, end, KEYS):
        key = key_start + tl.arange(0, KEYS)
        there = key < end
        block = tl.load(table + (key // BLOCK_SIZE) * tables_column, mask=there, other=0)
        slot = (
            block.to(tl.int64) * cache_block
            + kv_head.to(tl.int64) * cache_head
            + (key % BLOCK_SIZE) * HEAD_DIM
        )
        slots = cache_ptr + slot[:, None] + column[None, :]
        inside = there[:, None]
        if COLUMNS != HEAD_DIM:
            inside = inside & (column < HEAD_DIM)[None, :]
        keys = tl.load(slots, mask=inside, other=0.0)
        values = tl.load(slots + cache_value, mask=inside, other=0.0)
        if INTERPRETED:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if CAPPED:
            scores = (2 * tl.sigmoid(2 * scale / softcap * scores) - 1) * (softcap * LOG2_E)
        else:
            scores *= scale_log2
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - now)
        weight = tl.exp2(scores - now[:, None])
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weight.to(values.dtype), values, mixed, input_precision="ieee")
        top = now

    # A row may see no key of a split, which then has no weight in the merge.
    seen_some = total > 0
    mixed = mixed / tl.where(seen_some, total, 1.0)[:, None]
    place = (split.to(tl.int64) * tokens + token_row) * heads + head
    tl.store(
        out_ptr + place[:, None] * HEAD_DIM + column[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=live_columns,
    )
    if SPLITS > 1:
        lse = tl.where(seen_some, top + tl.log2(tl.where(seen_some, total, 1.0)), -1.0e30)
        tl.store(lse_ptr + place, lse, mask=live)


@triton.jit
def _merge(
    parts_ptr,
    lse_ptr,
    out_ptr,
    tokens,
    heads,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge parts [SPLITS, tokens, heads, HEAD_DIM], each divided by its own total 2 ** lse."""
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    split = tl.arange(0, SPLITS).to(tl.int64) * tokens * heads + place
    column = tl.arange(0, COLUMNS)
    inside = column < HEAD_DIM
    lse = tl.load(lse_ptr + split)
    weight = tl.exp2(lse - tl.max(lse, 0))
    places = parts_ptr + split[:, None] * HEAD_DIM + column[None, :]
    parts = tl.load(places, mask=inside[None, :], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    kept = merged.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * HEAD_DIM + column, kept, mask=inside)
