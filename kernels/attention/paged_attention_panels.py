"""Paged attention in compiled code on a CPU; `cpu/attention.c` describes the algorithm.

The cache has the same shape as elsewhere, but within a block the keys of a head, and its values,
lie in the panels that products read. Both writers and readers of a cache ask `ops_on_panels`.
"""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.spans import HeadShape, KvScales, Scoring, Spans
from penstock.kernels.cpu.library import compiled_ops
from penstock.kernels.numbers.fp8 import FP8

_MAX_HEAD, _MAX_GROUP = 256, 48
# Types of a cache, by which compiled code knows what is in it.
KINDS = {torch.bfloat16: 0, FP8: 1, torch.int8: 2}


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
        and kv_cache.dtype in KINDS
        and kv_cache.device.type == "cpu"
    )
    return compiled_ops() if lies else None


class PackedCache(ctypes.Structure):
    """A cache as compiled code reads it; its memory must outlive it."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("kv_heads", "block_size", "head_dim", "kept")],
        *[(name, ctypes.c_float) for name in ("key_scale", "value_scale")],
    )


def packed_cache(kv_cache: Tensor, head_dim: int, scales: KvScales) -> PackedCache:
    _, kv_heads, _, block_size, _ = kv_cache.shape
    kind = KINDS[kv_cache.dtype]
    blocks = kv_cache.data_ptr()
    return PackedCache(blocks, kv_heads, block_size, head_dim, kind, scales.key, scales.value)


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
    """Return a copy, in panels, of a cache that has each position's numbers in a row.

    In either a scale of int8 follows: there a row's numbers, here those of all positions.
    """
    if kv_cache.dtype == torch.int8:
        numbers, scales = kv_cache.tensor_split((-4,), -1)
        panels, scales = to_panels(numbers.view(torch.uint8)), scales.flatten(3)
        return torch.cat((panels.view(torch.int8).flatten(3), scales), 3).view(kv_cache.shape)
    if kv_cache.dtype in (torch.uint8, FP8):
        keys, values = kv_cache.view(torch.uint8).unbind(2)
        rows = *keys.shape[:2], keys.shape[2] // 16, 16
        keys = keys.view(*rows, -1).transpose(3, 4).reshape(keys.shape)
        values = values.view(*rows, -1, 16).transpose(3, 4).reshape(values.shape)
        return torch.stack((keys, values), 2).view(kv_cache.dtype)
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
        ctypes.byref(packed_cache(kv_cache, head_dim, scoring.scales)),
        spans.query_start.data_ptr(),
        spans.context_lens.data_ptr(),
        tables.data_ptr(),
        tables.shape[1],
        len(spans.context_lens),
        heads,
        ctypes.byref(packed_scoring(scoring)),
        out.data_ptr(),
    )
    if status:
        raise MemoryError("paged attention found no memory for what its threads work with")
    return out
