"""Weights that lie in mapped files become memory of their own, so that the files are unmapped.

transformers hands out views of the files. One that nothing swaps, such as an embedding, would keep
its whole file mapped, and each page that was read stays a part of this process's memory meanwhile.
"""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")


def unmap(module: nn.Module, files: Sequence[Path]) -> None:
    """Copy what lies in mapped files, tensor by tensor; where no /proc is, all stays as it is."""
    ranges = _ranges({str(file.resolve()) for file in files})
    for tensor in chain(module.parameters(), module.buffers()):
        view = tensor.data
        if any(view.data_ptr() in addresses for addresses in ranges):
            tensor.data = view.clone()
            _forget(view)


def _ranges(paths: set[str]) -> list[range]:
    """Return the addresses where files are mapped."""
    ranges = []
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            words = line.split(maxsplit=5)
            if words[-1] in paths:
                begin, end = (int(word, 16) for word in words[0].split("-"))
                ranges.append(range(begin, end))
    return ranges


def _forget(view: Tensor) -> None:
    """Let go of the pages between a tensor's ends; who reads them again has them from the file."""
    begin = -(-view.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (view.data_ptr() + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if view.is_contiguous() and begin < end:
        with suppress(OSError, AttributeError):  # another C library
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
