"""The work between the products of a layer with latents (MLA) and its attention.

Latents are normalised, and the numbers of queries and keys that are turned are rotated. Latent and
turned key go into their slot of the paged cache, one after the other.

    query_rest  [tokens, heads, rest]   from the queries; its last dimension has no gaps
    latents     [tokens, latent + rest] likewise
    kv_cache    [num_blocks, 1, 1, block_size, latent + rest]; gains the keys
    returns     [tokens, heads, rest]   the rotated part of the queries

`plan_latent_store` does once the work that the layers of a step share; each layer calls what it
returns. A token whose slot is -1 is not stored on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.cache.rotate_and_store import Rotation
from penstock.kernels.cache.store_kv import key_rows, store_rows
from penstock.kernels.numbers.device import on_gpu
from penstock.kernels.rows.norm import NormWeights, normalise
from penstock.kernels.rows.rotary import rotary

# (query_rest, latents, norm, kv_cache) -> the rotated query_rest
StoreLatents = Callable[[Tensor, Tensor, NormWeights, Tensor], Tensor]


def plan_latent_store(rotation: Rotation, slot_mapping: Tensor, kv_cache: Tensor) -> StoreLatents:
    """Plan one step; return the function that each layer calls.

    kv_cache  the cache of any layer; all have one shape
    """
    if on_gpu(kv_cache):
        # Imported here: not every platform without a GPU has triton.
        from penstock.kernels.cache.store_latents_triton import store_latents_triton

        return lambda query_rest, latents, norm, kv_cache: store_latents_triton(
            query_rest, latents, norm, rotation, slot_mapping, kv_cache
        )
    rows = key_rows(slot_mapping, kv_cache)
    return lambda query_rest, latents, norm, kv_cache: store_latents_ref(
        query_rest, latents, norm, rotation, kv_cache, rows
    )


def store_latents_ref(
    query_rest: Tensor,
    latents: Tensor,
    norm: NormWeights,
    rotation: Rotation,
    kv_cache: Tensor,
    rows: Tensor,
) -> Tensor:
    """Rotate and store in torch. `rows` are those of `key_rows`."""
    latent, key = latents.tensor_split((len(norm.weight),), 1)
    heads = rotary(torch.cat((query_rest, key[:, None]), 1), rotation.cos, rotation.sin)
    latent = normalise(latent.contiguous(), norm)
    entry = torch.cat((latent, heads[:, -1]), 1)[:, None]
    store_rows(entry, entry, kv_cache, rows)
    return heads[:, :-1]
