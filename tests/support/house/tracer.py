"""The functions of ours that a request calls, traced by each process that calls them.

A folder holds `window`, a byte: the number of the request that goes on now, or zero. Each process
writes a file of its own there, one line for the first call of a function in a window. The main
thread is traced from SIGUSR2 on, so that a process starts as fast as ever, the others always.
"""

import mmap
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType

from house.sources import SOURCES


def prepare(folder: str) -> None:
    """Make this process ready to be traced, before it does anything else."""
    with Path(folder, "window").open("r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    calls = os.open(f"{folder}/{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    calls_so_far = set[tuple[int, int]]()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code, number = frame.f_code, window[0]
        if not number or event != "call" or (number, id(code)) in calls_so_far:
            return
        calls_so_far.add((number, id(code)))
        # Comprehensions and lambdas belong to the function that they stand in.
        if (path := _path_of_ours(code.co_filename)) and not code.co_name.startswith("<"):
            line = f"{number}\t{path}\t{code.co_firstlineno}\t{code.co_qualname}\n"
            os.write(calls, line.encode())

    threading.setprofile(trace)
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.setprofile(trace))


@cache
def _path_of_ours(filename: str) -> Path | None:
    path = Path(filename)
    return path if path in SOURCES else None
