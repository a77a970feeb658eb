"""The work between a layer's first product and its attention, in one kernel for a GPU.

A program takes some heads of one token: it normalises and rotates queries and keys, writes the
queries, and puts keys and values into the cache. A token whose slot is -1 is not stored.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.spans import NO_SCALES, HeadShape, KvScales
from penstock.kernels.numbers.device import INTERPRETED
from penstock.kernels.numbers.fp8_triton import to_fp8

_MOST_NUMBERS = 2048  # numbers in the heads that a program takes


def rotate_and_store_triton(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    rotation: tuple[Tensor, Tensor] | None,
    slot_mapping: Tensor,
    shape: HeadShape,
    kv_cache: Tensor,
    scales: KvScales = NO_SCALES,
) -> Tensor:
    """Compute what `kernels.cache.rotate_and_store` says.

    norms     weights [head_dim] for queries and for keys, and eps: by the root of the mean square
    rotation  cosines and sines [tokens, head_dim]
    """
    tokens, heads = len(qkv), shape.num_heads + 2 * shape.num_kv_heads
    query = torch.empty(
        (tokens, shape.num_heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device
    )
    half = shape.head_dim // 2
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(heads), max(1, _MOST_NUMBERS // (2 * columns)))
    query_weight, key_weight, eps = norms or (qkv, qkv, 0.0)
    cos, sin = rotation or (qkv, qkv)
    _rotate_and_store[(tokens, triton.cdiv(heads, rows))](
        qkv,
        query_weight,
        key_weight,
        cos,
        sin,
        slot_mapping,
        query,
        kv_cache,
        eps,
        scales.key,
        scales.value,
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HALF=half,
        BLOCK_SIZE=kv_cache.shape[3],
        ROWS=rows,
        COLUMNS=columns,
        NORMALISES=norms is not None,
        ROTATES=rotation is not None,
        HAS_SCALES=scales != NO_SCALES,
        IS_INTERPRETED=INTERPRETED,
        num_warps=max(1, min(4, rows * columns // 128)),
    )
    return query


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,
    cache_ptr,
    eps,
    key_scale,
    value_scale,
    cache_block,
    cache_head,
    cache_value,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALISES: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    live = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    heads = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM + column[None, :]
    kept_first = tl.load(heads, mask=live, other=0.0)
    kept_second = tl.load(heads + HALF, mask=live, other=0.0)
    first, second = kept_first.to(tl.float32), kept_second.to(tl.float32)
    if NORMALISES:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        of_query, of_key = query_weight_ptr + column, key_weight_ptr + column
        weight = tl.where(
            is_query[:, None],
            tl.load(of_query, mask=inside, other=0.0)[None, :],
            tl.load(of_key, mask=inside, other=0.0)[None, :],
        )
        first *= factor * weight.to(tl.float32)
        weight = tl.where(
            is_query[:, None],
            tl.load(of_query + HALF, mask=inside, other=0.0)[None, :],
            tl.load(of_key + HALF, mask=inside, other=0.0)[None, :],
        )
        second *= factor * weight.to(tl.float32)
    if ROTATES:
        turn = token * HEAD_DIM + column
        cos = tl.load(cos_ptr + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
        new_first = first * cos + second * sin
        cos = tl.load(cos_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = second * cos + first * sin
        first = new_first

    queries = query_ptr + (token * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    to_query = is_query[:, None] & inside[None, :]
    tl.store(queries, first.to(query_ptr.dtype.element_ty), mask=to_query)
    tl.store(queries + HALF, second.to(query_ptr.dtype.element_ty), mask=to_query)

    slot = tl.load(slots_ptr + token)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    place = (
        slot // BLOCK_SIZE * cache_block
        + kv_head.to(tl.int64) * cache_head
        + tl.where(is_value, cache_value, 0)
        + slot % BLOCK_SIZE * HEAD_DIM
    )
    cells = cache_ptr + place[:, None] + column[None, :]
    stored_head = tl.where(slot >= 0, head, 0)
    to_cache = live & (stored_head >= HEADS)[:, None]
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    first = tl.where(is_value[:, None], kept_first.to(tl.float32), first)
    second = tl.where(is_value[:, None], kept_second.to(tl.float32), second)
    if HAS_SCALES:
        scale = tl.where(is_value, value_scale, key_scale)[:, None]
        first, second = tl.div_rn(first, scale), tl.div_rn(second, scale)
    tl.store(cells, as_kept(first, kind, IS_INTERPRETED), mask=to_cache)
    tl.store(cells + HALF, as_kept(second, kind, IS_INTERPRETED), mask=to_cache)


@triton.jit
def as_kept(x, kind: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return the float32 numbers as a cache of this kind has them (`kernels.cache.store_kv`)."""
    if kind == tl.float8e4nv:
        return to_fp8(x, IS_INTERPRETED)
    return x.to(kind)
