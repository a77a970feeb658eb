"""Flash decoding: attention of one-token queries on a GPU, split along the keys (split-K).

One program a query and key head is often too few to fill the device. So each program takes some of
the keys, and a second kernel merges the parts.
"""

# A jitted kernel's parameters are pointers and numbers of triton's, with no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.spans import Spans

# A split has so many keys at least, and a device so many programs for each of its processors.
_SPLIT_KEYS = 256
_PROGRAMS = 4
_MOST_SPLITS = 64
_MOST_COLUMNS = 256  # columns that a program merges
_PROCESSORS, _SHARED_BYTES = 132, 227 * 2**10  # where there is no device to ask
NO_KEYS = tl.constexpr(-1.0e30)  # stands for the logarithm of 0


class Tile(NamedTuple):
    """How many rows of queries and how many keys a program takes at once, and with what means."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def num_splits(spans: Spans, window: int | None, programs: int, device: torch.device) -> int:
    """Return the number of splits, a power of two; more than 1 only for one-token queries.

    programs  how many there are without a split
    """
    if spans.max_query_len > 1:
        return 1
    num_visible = min(spans.max_context_len, window or spans.max_context_len)
    room = max(1, _PROGRAMS * _num_processors(device) // programs)
    splits = min(room, triton.cdiv(num_visible, _SPLIT_KEYS), _MOST_SPLITS)
    return int(triton.next_power_of_2(splits))


@cache
def shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _SHARED_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])  # what triton itself refuses to go beyond


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def merge(parts: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the merge [tokens, heads, size] of parts [splits, tokens, heads, size].

    lse  [splits, tokens, heads] float32, the logarithm to base 2 of each part's total
    """
    splits, tokens, heads, size = parts.shape
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    columns = min(_MOST_COLUMNS, max(16, triton.next_power_of_2(size)))
    _merge[(tokens, heads, triton.cdiv(size, columns))](
        parts,
        lse,
        out,
        tokens,
        heads,
        SPLITS=splits,
        SIZE=size,
        COLUMNS=columns,
        num_warps=1 if splits * columns <= 2048 else 4,
    )
    return out


@triton.jit
def weigh(scores, top, total, factor):
    """Take a tile of scores [rows, keys] into a running softmax, in powers of two.

    Returns its maximum and sum, by what the sums so far fade, and the weights of the keys.
    """
    now = tl.maximum(top, tl.max(scores, 1) * factor)
    fade = tl.exp2(top - now)
    weight = tl.exp2(scores * factor - now[:, None])  # one instruction before the power
    return now, total * fade + tl.sum(weight, 1), fade, weight


@triton.jit
def settle(top, total, mix):
    """Return what was mixed divided by its sum, and the sum's logarithm.

    A row may see no key of a split, which then has no weight in the merge.
    """
    has_keys = total > 0
    total = tl.where(has_keys, total, 1.0)
    return mix / total[:, None], tl.where(has_keys, top + tl.log2(total), NO_KEYS)


@triton.jit
def _merge(
    parts_ptr,
    lse_ptr,
    out_ptr,
    tokens,
    heads,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge parts [SPLITS, tokens, heads, SIZE], each divided by its own total 2 ** lse.

    A part without keys was not written.
    """
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    split = tl.arange(0, SPLITS).to(tl.int64) * tokens * heads + place
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    lse = tl.load(lse_ptr + split)
    weight = tl.exp2(lse - tl.max(lse, 0))
    places = parts_ptr + split[:, None] * SIZE + column[None, :]
    mask = (lse > NO_KEYS)[:, None] & inside[None, :]
    parts = tl.load(places, mask=mask, other=0.0)
    mean = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    out = mean.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * SIZE + column, out, mask=inside)
