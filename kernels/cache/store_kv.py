"""Writes the keys and values of new tokens into their slots of the paged KV cache.

key, value     [tokens, kv_heads, head_dim]
kv_cache       [num_blocks, kv_heads, 2, block_size, head_dim], contiguous; keys, then values; or
               with 1 in the place of 2, and keys alone are stored. Of 8 bits: `eight_bits`
slot_mapping   [tokens]   int64; block * block_size + offset; no slot twice
"""

import torch
from torch import Tensor

from penstock.kernels.attention.spans import NO_SCALES, KvScales
from penstock.kernels.numbers.eight_bits import flat_rows, kept


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    store_kv_ref(key, value, kv_cache, slot_mapping)


def store_kv_ref(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    store_rows(key, value, kv_cache, key_rows(slot_mapping, kv_cache))


def key_rows(slot_mapping: Tensor, kv_cache: Tensor) -> Tensor:
    """Return the place of each key, in rows of one position and head: [tokens * kv_heads].

    It is the same for all layers with such a cache.
    """
    _, kv_heads, parts, block_size, _ = kv_cache.shape
    block = slot_mapping.div(block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    heads = torch.arange(kv_heads, device=slot_mapping.device)
    return ((block[:, None] * kv_heads + heads) * (parts * block_size) + offset[:, None]).view(-1)


def store_rows(
    key: Tensor, value: Tensor, kv_cache: Tensor, rows: Tensor, scales: KvScales = NO_SCALES
) -> None:
    """Store keys and values like `store_kv`, at the rows that `key_rows` has computed."""
    block_size, width = kv_cache.shape[3:]
    flat, dtype = flat_rows(kv_cache, width), kv_cache.dtype
    flat.index_copy_(0, rows, kept(key, dtype, scales.key).reshape(-1, width))
    if kv_cache.shape[2] > 1:
        flat[block_size:].index_copy_(0, rows, kept(value, dtype, scales.value).reshape(-1, width))
