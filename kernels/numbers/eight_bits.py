"""Keys and values in 8 bits: the rows of a cache, and the numbers that they stand for.

fp8   e4m3; what stands in the cache is multiplied by a scale of the layer
int8  the largest of a row is 127; its scale, float32, stands behind it in the same row
"""

import torch
from torch import Tensor

from penstock.kernels.numbers.fp8 import FP8, as_fp8

INT8 = torch.int8
_MOST = 127.0
_SCALE = torch.float32


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the numbers of one position and head in a cache of this type, its scale counted."""
    return head_dim + (_SCALE.itemsize if dtype == INT8 else 0)


def flat_rows(kv_cache: Tensor, width: int) -> Tensor:
    """Return a cache as rows [.., width]: those of 8 bits as bytes, which torch can index."""
    return (kv_cache.view(torch.uint8) if kv_cache.itemsize == 1 else kv_cache).view(-1, width)


def kept(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return rows [.., head_dim] as a cache of this type has them, as `flat_rows` gives them.

    scale  what rows of fp8 are divided by
    """
    if dtype == FP8:
        return as_fp8(x.float() / scale).view(torch.uint8)
    if dtype != INT8:
        return x
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / _MOST
    scales = scales.masked_fill(scales == 0, 1.0)
    numbers = (wide / scales).round().to(INT8)
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), -1)


def widened(rows: Tensor, kept_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return what rows [.., width] of a cache stand for, but for a layer's scale."""
    if kept_dtype == FP8:
        return rows.view(FP8).to(dtype)
    if kept_dtype != INT8:
        return rows
    numbers, scales = rows.tensor_split((-_SCALE.itemsize,), -1)
    return (numbers.view(INT8) * scales.contiguous().view(_SCALE)).to(dtype)
