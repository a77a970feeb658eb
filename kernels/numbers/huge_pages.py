"""Huge pages for weights and caches, and freed memory that the process keeps.

Every step reads weights and caches, hundreds of megabytes. With pages of 4 KiB each page must be
looked up, and the processor's prefetching stops at its end. Large pages save some 3 % of a step of
a 135M model.
"""

import ctypes
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 * 2**20
_REGION = 64 * 2**20  # only written pages of a region take memory
_LINE = 64
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # as malloc.h has them

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)  # the unused rest of the last region


def take(size: int) -> Tensor:
    """Return zeros [size] uint8 at a multiple of 64 bytes.

    Pieces lie side by side in regions; a larger one has memory of its own. A region goes back
    to the system with the last of its pieces; the newest region stays.
    """
    global _rest
    if size > _REGION:
        return _map(size)
    room = -(-size // _LINE) * _LINE
    with _lock:
        if len(_rest) < room:
            _rest = _map(_REGION)
        piece, _rest = _rest[:size], _rest[room:]
    return piece


def keep_freed() -> None:
    """Have glibc keep what the process frees, for what it takes next.

    Else each tensor of more than 32 MiB is mapped anew, and its pages are filled with zeros, which
    takes longer than to write it. The process stays as large as it once was, and some tensors more.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _map(size: int) -> Tensor:
    """Map memory at a multiple of 2 MiB, since only whole aligned pages become huge pages."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + size]
