"""The work between the products of a layer with latents (MLA) and its attention, in one kernel.

A program takes one token: it normalises its latent, rotates its key, stores both, and rotates its
queries. A token whose slot is -1 is not stored.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache.rotate_and_store import Rotation
from penstock.kernels.cache.rotate_and_store_triton import as_kept
from penstock.kernels.numbers.device import INTERPRETED
from penstock.kernels.rows.norm import NormWeights


def store_latents_triton(
    query_rest: Tensor,
    latents: Tensor,
    norm: NormWeights,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
) -> Tensor:
    """Compute what `cache.store_latents` says; the norm is by the root of the mean square."""
    tokens, heads, size = query_rest.shape
    out = torch.empty(query_rest.shape, dtype=query_rest.dtype, device=query_rest.device)
    latent = len(norm.weight)
    rows, half, columns = (triton.next_power_of_2(n) for n in (heads, size // 2, latent))
    _store_latents[(tokens,)](
        query_rest,
        latents,
        norm.weight,
        rotation.cos,
        rotation.sin,
        slot_mapping,
        out,
        kv_cache,
        norm.eps,
        query_rest.stride(0),
        query_rest.stride(1),
        latents.stride(0),
        kv_cache.stride(0),
        HEADS=heads,
        HALF=size // 2,
        LATENT=latent,
        BLOCK_SIZE=kv_cache.shape[3],
        ROWS=rows,
        HALF_COLUMNS=half,
        COLUMNS=columns,
        IS_INTERPRETED=INTERPRETED,
        num_warps=4,
    )
    return out


@triton.jit
def _store_latents(
    query_ptr,
    latents_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    out_ptr,
    cache_ptr,
    eps,
    query_row,
    query_head,
    latents_row,
    cache_block,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    REST: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_COLUMNS)
    inside = column < HALF
    turn = token * REST + column
    cos = tl.load(cos_ptr + turn, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin_ptr + turn + HALF, mask=inside, other=0.0).to(tl.float32)

    head = tl.arange(0, ROWS)
    live = (head < HEADS)[:, None] & inside[None, :]
    queries = query_ptr + token * query_row + head[:, None] * query_head + column[None, :]
    first = tl.load(queries, mask=live, other=0.0).to(tl.float32)
    second = tl.load(queries + HALF, mask=live, other=0.0).to(tl.float32)
    targets = out_ptr + (token * HEADS + head)[:, None] * REST + column[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(targets, (first * cos + second * sin).to(kind), mask=live)
    tl.store(targets + HALF, (second * second_cos + first * second_sin).to(kind), mask=live)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = latents_ptr + token * latents_row
        cell = cache_ptr + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * (LATENT + REST)
        cache_kind: tl.constexpr = cache_ptr.dtype.element_ty
        key = tl.load(row + LATENT + column, mask=inside, other=0.0).to(tl.float32)
        key_second = tl.load(row + LATENT + HALF + column, mask=inside, other=0.0).to(tl.float32)
        turned_key = key * cos + key_second * sin
        tl.store(
            cell + LATENT + column, as_kept(turned_key, cache_kind, IS_INTERPRETED), mask=inside
        )
        turned_key = key_second * second_cos + key * second_sin
        tl.store(
            cell + LATENT + HALF + column,
            as_kept(turned_key, cache_kind, IS_INTERPRETED),
            mask=inside,
        )
        place = tl.arange(0, COLUMNS)
        within = place < LATENT
        latent = tl.load(row + place, mask=within, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        latent *= tl.load(weight_ptr + place, mask=within, other=0.0).to(tl.float32)
        tl.store(cell + place, as_kept(latent, cache_kind, IS_INTERPRETED), mask=within)
