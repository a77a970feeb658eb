"""The work between a layer's first product and its attention.

The heads of queries and keys are normalised, if the model does that, and rotated (RoPE). Keys and
values go into their slots of the paged KV cache.

    qkv       [tokens, (heads + 2 * kv_heads) * head_dim], contiguous
    kv_cache  as in `paged_attention`; gains the keys and values
    returns   [tokens, heads, head_dim], the queries, contiguous or not

`plan_store` does once the work that the layers of a step share; each layer calls what it returns.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.paged_attention_panels import ops_on_panels, packed_cache
from penstock.kernels.attention.spans import NO_SCALES, HeadShape, KvScales
from penstock.kernels.cache.store_kv import key_rows, store_rows
from penstock.kernels.numbers.device import on_gpu
from penstock.kernels.rows.norm import NormWeights, normalise, normalise_compiled
from penstock.kernels.rows.rotary import rotary


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and keys: of each head or, with `whole_rows`, of all as one row."""

    query: NormWeights
    key: NormWeights
    whole_rows: bool = False

    @property
    def are_of_heads(self) -> bool:
        """Return whether each is one row of weights for all heads, by the root mean square."""
        norms = (self.query, self.key)
        return not self.whole_rows and all(
            norm.weight.dim() == 1 and norm.bias is None and not norm.centers for norm in norms
        )


class Store(Protocol):
    """Returns the queries. `scales` are a layer's, and count in a cache of fp8."""

    def __call__(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        kv_cache: Tensor,
        scales: KvScales = NO_SCALES,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each token: cosines and sines [tokens, head_dim], as `rotary` reads them."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """The rotation of each token, and the slot for its keys and values.

    rotation      None where nothing is turned
    slot_mapping  [tokens] int64; block * block_size + offset; no slot twice
    """

    rotation: Rotation | None
    slot_mapping: Tensor


def plan_store(
    places: Places, shape: HeadShape, kv_cache: Tensor, backend: Backend = "auto"
) -> Store:
    """Plan one step; return the function that each layer calls.

    kv_cache  the cache of any layer; all have one shape
    backend   the one that computes attention over this cache
    """
    if on_gpu(kv_cache) and shape.head_dim % 2 == 0:
        return lambda qkv, norms, kv_cache, scales=NO_SCALES: _on_gpu(
            qkv, norms, places, shape, kv_cache, scales
        )
    ops = ops_on_panels(kv_cache, shape, backend)
    if ops is not None:
        return lambda qkv, norms, kv_cache, scales=NO_SCALES: rotate_and_store_panels(
            ops, qkv, norms, places, shape, kv_cache, scales
        )
    rows = key_rows(places.slot_mapping, kv_cache)
    return lambda qkv, norms, kv_cache, scales=NO_SCALES: rotate_and_store_ref(
        qkv, norms, places, shape, kv_cache, rows, scales
    )


def rotate_and_store_ref(
    qkv: Tensor,
    norms: HeadNorms | None,
    places: Places,
    shape: HeadShape,
    kv_cache: Tensor,
    rows: Tensor,
    scales: KvScales = NO_SCALES,
) -> Tensor:
    """Rotate and store in torch. `rows` are those of `key_rows`."""
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, shape.head_dim)
    qk, value = heads.tensor_split((num_heads + num_kv_heads,), 1)
    if norms:
        query, key = qk.tensor_split((num_heads,), 1)
        qk = torch.cat(
            [_normalised(query, norms, norms.query), _normalised(key, norms, norms.key)], 1
        )
    if places.rotation:
        qk = rotary(qk, places.rotation.cos, places.rotation.sin)
    query, key = qk.tensor_split((num_heads,), 1)
    store_rows(key, value, kv_cache, rows, scales)
    return query


def _on_gpu(
    qkv: Tensor,
    norms: HeadNorms | None,
    places: Places,
    shape: HeadShape,
    kv_cache: Tensor,
    scales: KvScales,
) -> Tensor:
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.cache.rotate_and_store_triton import rotate_and_store_triton

    if norms and not norms.are_of_heads:
        query, key, value = torch.split(qkv, shape.rows, -1)
        query = _normalised(query.view(len(qkv), -1, shape.head_dim), norms, norms.query)
        key = _normalised(key.view(len(qkv), -1, shape.head_dim), norms, norms.key)
        qkv, norms = torch.cat((query.flatten(1), key.flatten(1), value), 1), None
    weights = (norms.query.weight, norms.key.weight, norms.query.eps) if norms else None
    turn = places.rotation
    rotation = (turn.cos, turn.sin) if turn else None
    slots = places.slot_mapping
    return rotate_and_store_triton(qkv, weights, rotation, slots, shape, kv_cache, scales)


def _normalised(heads: Tensor, norms: HeadNorms, norm: NormWeights) -> Tensor:
    rows = heads.flatten(1) if norms.whole_rows else heads.contiguous()
    return normalise(rows, norm).view(heads.shape)


def rotate_and_store_panels(
    ops: ctypes.CDLL,
    qkv: Tensor,
    norms: HeadNorms | None,
    places: Places,
    shape: HeadShape,
    kv_cache: Tensor,
    scales: KvScales = NO_SCALES,
) -> Tensor:
    """Rotate and store in compiled code, into a cache whose blocks hold panels.

    Whole rows are normalised in place.
    """
    if norms and norms.whole_rows:
        num = shape.num_heads * shape.head_dim
        query, key = qkv[:, :num], qkv[:, num : num + shape.num_kv_heads * shape.head_dim]
        normalise_compiled(ops, query, norms.query, query)
        normalise_compiled(ops, key, norms.key, key)
        norms = None
    query, turns = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim), places.rotation
    ops.rotate_and_store(
        qkv.data_ptr(),
        norms.query.weight.data_ptr() if norms else None,
        norms.key.weight.data_ptr() if norms else None,
        norms.query.eps if norms else 0.0,
        turns.cos.data_ptr() if turns else None,
        turns.sin.data_ptr() if turns else None,
        places.slot_mapping.data_ptr(),
        ctypes.byref(packed_cache(kv_cache, shape.head_dim, scales)),
        query.data_ptr(),
        len(qkv),
        shape.num_heads,
    )
    return query
