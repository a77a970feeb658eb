"""Memory for what is read all over in every step, in pages of 2 MiB where the system has them.

Weights and caches are hundreds of megabytes: in pages of 4 KiB each is looked up anew, and the
processor's own fetching ends with it. Worth some 3 % of a step of a 135M model.
"""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 * 2**20
_REGION = 64 * 2**20  # of which only what is written takes memory
_LINE = 64

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)  # of the last region


def take(size: int) -> Tensor:
    """[size] uint8, zero, at a multiple of 64 bytes, beside what was taken before.

    A region goes back to the system with the last of its pieces; the last region stays.
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


def _map(size: int) -> Tensor:
    """At a multiple of 2 MiB: only whole ones become huge pages."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + size]
