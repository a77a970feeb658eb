"""Multi-head latent attention (MLA; DeepSeek-AI, 2024) over a paged cache on a GPU.

All heads share one key a token: a latent, which is the value too, and a few rotated numbers. So a
program takes a tile of (token, head) pairs and reads each key once, for both products. Short
queries are split along the keys where their programs are too few to fill the device.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.spans import Scoring, Spans
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

_FEW_HEADS = 16
_ROW_BYTES = 1152  # a key of 576 numbers in bf16, for which the tiles below were compiled
# Tiles, of which the first that fits is taken, and the most KiB that a program of each shares as
# compiled for sm_80, sm_86, sm_89, sm_90 and sm_120. No formula gives these: queries and weights
# lie there only for some, and one stage takes more than two. docs/kernels.md has what each takes.
_TILES = (
    (Tile(64, 32, 8, 2), 144.0),
    (Tile(32, 32, 8, 2), 74.0),
    (Tile(16, 32, 4, 2), 55.0),
    (Tile(16, 16, 4, 2), 36.5),
)


def latent_attention_triton(
    query: Tensor,
    kv_cache: Tensor,
    spans: Spans,
    scoring: Scoring,
    latent: int,
    *,
    deterministic: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute the attention: query [tokens, heads, size of a key] -> [tokens, heads, latent].

    kv_cache       [num_blocks, 1, 1, block_size, size of a key], contiguous
    latent         values are the first so many numbers of the keys
    deterministic  do not split, so that a row's bits do not depend on the batch
    tile, splits   None means those that suit the batch
    """
    tokens, heads, size = query.shape
    query = query.contiguous()
    seqs = len(spans.context_lens)
    columns, rest = (max(16, triton.next_power_of_2(n)) for n in (latent, size - latent))
    if tile is None:
        row_bytes = (columns + rest) * query.element_size()
        tile = fitting_latent_tile(heads, row_bytes, shared_bytes(query.device))
    tiles = triton.cdiv(spans.max_query_len * heads, tile.rows)
    if splits is None:
        splits = 1 if deterministic else num_splits(spans, None, tiles * seqs, query.device)
    kind = torch.float32 if splits > 1 else query.dtype
    out = torch.empty((splits, tokens, heads, latent), dtype=kind, device=query.device)
    lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=query.device)
    _latent_attention[(tiles * splits, seqs)](
        query,
        kv_cache,
        out,
        lse,
        spans.query_start,
        spans.context_lens,
        spans.block_tables,
        kv_cache.stride(0),
        *spans.block_tables.stride(),
        tokens,
        scoring.scale,
        HEADS=heads,
        ROWS=tile.rows,
        KEYS=tile.keys,
        BLOCK_SIZE=kv_cache.shape[3],
        SIZE=size,
        LATENT=latent,
        COLUMNS=columns,
        REST=rest,
        SPLITS=splits,
        IS_INTERPRETED=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out[0] if splits == 1 else merge(out, lse, query.dtype)


def fitting_latent_tile(heads: int, row_bytes: int, shared_bytes: int) -> Tile:
    """Return the tile for keys of so many bytes, on processors that share so many bytes each.

    It depends on no length, so that a row's bits do not either. The smallest is returned where none
    fits.
    """
    tiles = [pair for pair in _TILES if heads > _FEW_HEADS or pair[0].rows <= _FEW_HEADS]
    for tile, kib in tiles:
        if kib * 1024 * row_bytes <= shared_bytes * _ROW_BYTES:
            return tile
    return tiles[-1][0]


@triton.jit
def _latent_attention(
    query_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    context_lens_ptr,
    tables_ptr,
    cache_block,
    tables_row,
    tables_column,
    tokens,
    scale,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    # The last tiles see the most keys, so they come first.
    tile = (tl.num_programs(0) // SPLITS - 1) - tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    seq = tl.program_id(1)
    start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - start
    context = tl.load(context_lens_ptr + seq)
    if tile * ROWS >= query_len * HEADS:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    live = row < query_len * HEADS
    # int64 before it meets a size: long batches and caches have more than 2**31 elements.
    query_row = start.to(tl.int64) * HEADS + row
    place = split.to(tl.int64) * tokens * HEADS + query_row

    before = context - query_len  # tokens before the slice
    last_token = tl.minimum(query_len - 1, (tile * ROWS + ROWS - 1) // HEADS)
    end = before + last_token + 1
    first = 0
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end, SPLITS), KEYS) * KEYS
        first = split * share
        end = tl.minimum(end, first + share)
        if (split > 0) & (first >= end):  # a part without keys
            tl.store(lse_ptr + place, tl.full([ROWS], NO_KEYS, tl.float32), mask=live)
            return

    column = tl.arange(0, COLUMNS)
    rest_column = tl.arange(0, REST)
    inside, in_rest = column < LATENT, rest_column < SIZE - LATENT
    queries = query_ptr + query_row[:, None] * SIZE
    mask = live[:, None]
    if COLUMNS != LATENT:
        mask = mask & inside[None, :]
    query = tl.load(queries + column[None, :], mask=mask, other=0.0)
    rest_mask = live[:, None] & in_rest[None, :]
    query_rest = tl.load(queries + LATENT + rest_column[None, :], mask=rest_mask, other=0.0)
    if IS_INTERPRETED:
        query, query_rest = query.to(tl.float32), query_rest.to(tl.float32)

    top = tl.full([ROWS], NO_KEYS, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mix = tl.zeros([ROWS, COLUMNS], tl.float32)
    table = tables_ptr + seq.to(tl.int64) * tables_row
    position = before + row // HEADS
    # Keys that all queries of the tile see need no mask.
    seen_by_all = tl.minimum(end, before + tile * ROWS // HEADS + 1)
    masked_from = first + tl.maximum(0, seen_by_all - first) // KEYS * KEYS
    for key_start in range(first, masked_from, KEYS):
        top, total, mix = _attend_keys(
            query, query_rest, top, total, mix, key_start, end, position, table, tables_column,
            cache_ptr, cache_block, scale,
            KEYS, BLOCK_SIZE, SIZE, LATENT, COLUMNS, REST, False, IS_INTERPRETED,
        )  # fmt: skip
    for key_start in range(masked_from, end, KEYS):
        top, total, mix = _attend_keys(
            query, query_rest, top, total, mix, key_start, end, position, table, tables_column,
            cache_ptr, cache_block, scale,
            KEYS, BLOCK_SIZE, SIZE, LATENT, COLUMNS, REST, True, IS_INTERPRETED,
        )  # fmt: skip

    mix, lse = settle(top, total, mix)
    tl.store(
        out_ptr + place[:, None] * LATENT + column[None, :],
        mix.to(out_ptr.dtype.element_ty),
        mask=mask,
    )
    if SPLITS > 1:
        tl.store(lse_ptr + place, lse, mask=live)


@triton.jit
def _attend_keys(
    query,
    query_rest,
    top,
    total,
    mix,
    key_start,
    end,
    position,
    table,
    tables_column,
    cache_ptr,
    cache_block,
    scale,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Add one tile of keys to a running softmax: its maximum, its sum, and the mixed latents."""
    LOG2_E: tl.constexpr = 1.4426950408889634  # exp2 is the instruction that the hardware has
    key = key_start + tl.arange(0, KEYS)
    column, rest_column = tl.arange(0, COLUMNS), tl.arange(0, REST)
    there = key < end
    if IS_MASKED:
        block = tl.load(table + key // BLOCK_SIZE * tables_column, mask=there, other=0)
    else:
        block = tl.load(table + key // BLOCK_SIZE * tables_column)
    cells = cache_ptr + (block.to(tl.int64) * cache_block + key % BLOCK_SIZE * SIZE)[:, None]
    of_rest = cells + LATENT + rest_column[None, :]
    if IS_MASKED or COLUMNS != LATENT or REST != SIZE - LATENT:
        inside = there[:, None] & (column < LATENT)[None, :]
        keys = tl.load(cells + column[None, :], mask=inside, other=0.0)
        inside = there[:, None] & (rest_column < SIZE - LATENT)[None, :]
        keys_rest = tl.load(of_rest, mask=inside, other=0.0)
    else:
        keys = tl.load(cells + column[None, :])
        keys_rest = tl.load(of_rest)
    if IS_INTERPRETED:
        keys, keys_rest = keys.to(tl.float32), keys_rest.to(tl.float32)
    elif keys.dtype != query.dtype:
        keys, keys_rest = keys.to(query.dtype), keys_rest.to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = tl.dot(query_rest, tl.trans(keys_rest), scores, input_precision="ieee")
    if IS_MASKED:
        visible = there[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, -float("inf"))
    factor = scale * LOG2_E
    top, total, fade, weight = weigh(scores, top, total, factor)
    mix = mix * fade[:, None]
    mix = tl.dot(weight.to(keys.dtype), keys, mix, input_precision="ieee")
    return top, total, mix
