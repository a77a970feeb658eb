"""The work between a layer's first product and its attention.

The heads of queries and keys are normalised, if the model does that, and rotated. Keys and values
go into their slots of the paged cache.

    qkv       [tokens, (heads + 2 * kv_heads) * head_dim], contiguous
    kv_cache  as in `paged_attention`; gains the keys and values
    returns   [tokens, heads, head_dim], the queries, contiguous or not

`plan_store` does once the work that the layers of a step share; each layer calls what it returns.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.paged_attention_panels import ops_on_panels
from penstock.kernels.rms_norm import rms_norm
from penstock.kernels.rotary import rotary
from penstock.kernels.spans import HeadShape
from penstock.kernels.store_kv import key_rows, store_rows


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights [head_dim] of the norms of queries and keys."""

    query: Tensor
    key: Tensor
    eps: float


# (qkv, norms, kv_cache) -> queries
Store = Callable[[Tensor, HeadNorms | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Places:
    """The rotation of each token, and the slot for its keys and values.

    cos, sin      [tokens, head_dim]  as `penstock.kernels.rotary` reads them; None, both, where
                                      nothing is to be turned
    slot_mapping  [tokens]            int64; block * block_size + offset; no slot twice
    """

    cos: Tensor | None
    sin: Tensor | None
    slot_mapping: Tensor


def plan_store(places: Places, shape: HeadShape, kv_cache: Tensor) -> Store:
    """Plan one step; return the function that each layer calls.

    kv_cache  the cache of any layer; all have one shape
    """
    ops = ops_on_panels(kv_cache, shape)
    if ops is not None:
        return lambda qkv, norms, kv_cache: rotate_and_store_panels(
            ops, qkv, norms, places, shape, kv_cache
        )
    rows = key_rows(places.slot_mapping, shape.num_kv_heads, kv_cache.shape[3])
    return lambda qkv, norms, kv_cache: rotate_and_store_ref(
        qkv, norms, places, shape, kv_cache, rows
    )


def rotate_and_store_ref(
    qkv: Tensor,
    norms: HeadNorms | None,
    places: Places,
    shape: HeadShape,
    kv_cache: Tensor,
    rows: Tensor,
) -> Tensor:
    """Rotate and store in torch. `rows` are those of `key_rows`."""
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, shape.head_dim)
    turning, value = heads.tensor_split((num_heads + num_kv_heads,), 1)
    if norms:
        query, key = turning.tensor_split((num_heads,), 1)
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        turning = torch.cat((query, key), 1)
    if places.cos is not None and places.sin is not None:
        turning = rotary(turning, places.cos, places.sin)
    query, key = turning.tensor_split((num_heads,), 1)
    store_rows(key, value, kv_cache, rows)
    return query


def rotate_and_store_panels(
    ops: ctypes.CDLL,
    qkv: Tensor,
    norms: HeadNorms | None,
    places: Places,
    shape: HeadShape,
    kv_cache: Tensor,
) -> Tensor:
    """Rotate and store in compiled code, into a cache whose blocks hold panels."""
    query = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
    ops.rotate_and_store(
        qkv.data_ptr(),
        norms.query.data_ptr() if norms else None,
        norms.key.data_ptr() if norms else None,
        norms.eps if norms else 0.0,
        None if places.cos is None else places.cos.data_ptr(),
        None if places.sin is None else places.sin.data_ptr(),
        places.slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        query.data_ptr(),
        len(qkv),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        kv_cache.shape[3],
    )
    return query
