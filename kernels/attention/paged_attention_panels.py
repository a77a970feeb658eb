"""Paged attention in compiled code on a CPU; `cpu/attention.c` describes the algorithm.

The cache has the same shape as elsewhere, but within a block the keys of a head, and its values,
lie in the panels that products read. Both writers and readers of a cache ask `ops_on_panels`.
"""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.spans import HeadShape, Scoring, Spans
from penstock.kernels.numbers.device import ops_for

_MAX_HEAD, _MAX_GROUP = 256, 48


def ops_on_panels(
    kv_cache: Tensor, shape: HeadShape, backend: Backend = "auto"
) -> ctypes.CDLL | None:
    """Return the compiled operations if they work on such a cache; its blocks then hold panels.

    Return None otherwise.
    """
    lies = (
        backend != "torch"
        and shape.latent is None
        and shape.head_dim % 32 == 0
        and shape.head_dim <= _MAX_HEAD
        and shape.group <= _MAX_GROUP
        and kv_cache.shape[3] % 16 == 0
    )
    return ops_for(kv_cache) if lies else None


class PackedScoring(ctypes.Structure):
    """A scoring as compiled code reads it; the sinks' memory must outlive it."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


def packed_scoring(scoring: Scoring) -> PackedScoring:
    sinks = None if scoring.sinks is None else scoring.sinks.data_ptr()
    return PackedScoring(scoring.scale, scoring.window or 0, scoring.softcap or 0.0, sinks)


def to_panels(kv_cache: Tensor) -> Tensor:
    """Return a copy, in panels, of a cache that has each position's numbers in a row."""
    keys, values = kv_cache.unbind(2)
    blocks, kv_heads, size, head_dim = keys.shape
    keys = keys.view(blocks, kv_heads, size // 16, 16, head_dim // 2, 2).transpose(3, 4)
    values = values.view(blocks, kv_heads, size // 16, 8, 2, head_dim // 16, 16)
    values = values.permute(0, 1, 2, 5, 3, 6, 4)
    flat = (blocks, kv_heads, size, head_dim)
    return torch.stack((keys.reshape(flat), values.reshape(flat)), 2)


def paged_attention_panels(
    ops: ctypes.CDLL,
    query: Tensor,
    kv_cache: Tensor,
    spans: Spans,
    scoring: Scoring,
) -> Tensor:
    """Compute the attention.

    A row's bits depend neither on how a prompt was cut into slices, nor on the rows beside it.
    """
    _, heads, head_dim = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    tables = spans.block_tables.contiguous()
    status = ops.paged_attention(
        query.data_ptr(),
        kv_cache.data_ptr(),
        spans.query_start.data_ptr(),
        spans.context_lens.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        len(spans.context_lens),
        heads,
        kv_cache.shape[1],
        head_dim,
        kv_cache.shape[3],
        ctypes.byref(packed_scoring(scoring)),
        out.data_ptr(),
    )
    if status:
        raise MemoryError("paged attention found no memory for what its threads work with")
    return out
