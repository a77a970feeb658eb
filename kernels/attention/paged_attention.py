"""Paged attention: causal attention of queries over keys and values in the blocks of a cache.

    query     [tokens, heads, head_dim]; the slices of several sequences, end to end
    kv_cache  [num_blocks, kv_heads, 2, block_size, head_dim], contiguous; holds the batch's own
              keys and values; slots that were never written are finite. A latent shape has 1 in the
              place of 2: values are the first numbers of the keys. It may be of fp8 and, on a
              CPU, of int8 (`kernels.numbers.eight_bits`)
    returns   [tokens, heads, value_dim], contiguous

`plan_attention` does once the work that the layers of a step share; each layer calls what it
returns. Deterministic means that the bits of a row do not depend on the rows beside it.
"""

from collections.abc import Callable

from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.paged_attention_panels import ops_on_panels, paged_attention_panels
from penstock.kernels.attention.paged_attention_ref import attend, plan_gathers
from penstock.kernels.attention.paged_attention_tiled import attend_tiles, plan_tiles
from penstock.kernels.attention.spans import HeadShape, Scoring, Spans
from penstock.kernels.numbers.device import on_gpu

# (query, kv_cache, scoring) -> attended
Attend = Callable[[Tensor, Tensor, Scoring], Tensor]


def plan_attention(
    spans: Spans,
    shape: HeadShape,
    kv_cache: Tensor,
    window: int | None,
    deterministic: bool,
    backend: Backend = "auto",
) -> Attend:
    """Plan the attention of one step; return what each layer with this window calls.

    kv_cache  the cache of any layer that calls it; all have one shape
    backend   the same for all that write and read a cache
    """
    if backend != "torch" and on_gpu(kv_cache):
        return _on_gpu(spans, shape, deterministic)
    ops = ops_on_panels(kv_cache, shape, backend)
    if ops is not None:
        return lambda query, kv_cache, scoring: paged_attention_panels(
            ops, query, kv_cache, spans, scoring
        )
    if deterministic:
        tiles = plan_tiles(spans, shape, kv_cache, window)
        return lambda query, kv_cache, scoring: attend_tiles(query, kv_cache, tiles, scoring)
    gathers = plan_gathers(spans, shape, kv_cache, window)
    return lambda query, kv_cache, scoring: attend(query, kv_cache, gathers, scoring)


def _on_gpu(spans: Spans, shape: HeadShape, deterministic: bool) -> Attend:
    # Imported here: not every platform without a GPU has triton.
    from penstock.kernels.attention.latent_attention_triton import latent_attention_triton
    from penstock.kernels.attention.paged_attention_triton import paged_attention_triton

    latent = shape.latent
    if latent is not None:
        return lambda query, kv_cache, scoring: latent_attention_triton(
            query, kv_cache, spans, scoring, latent, deterministic=deterministic
        )
    return lambda query, kv_cache, scoring: paged_attention_triton(
        query, kv_cache, spans, scoring, deterministic=deterministic
    )
