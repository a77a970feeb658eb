"""A limit on the processor's time that a piece of Python may take.

One thread looks after all pieces that run, and ends when there were none for a while: a thread for
each would cost more than what it looks after.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TICK_S = 0.05
IDLE_TICKS = 200


class TookTooLong(Exception):
    """Raised in what has computed for as long as it may."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A block that runs in a thread until the thread's clock says `until_s`."""

    thread: int
    clock: Callable[[], float]
    until_s: float


class _TimeWatch:
    """The thread that looks after pieces, and the pieces that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces = set[_Piece]()
        self._thread: threading.Thread | None = None

    def add(self, piece: _Piece) -> None:
        with self._lock:
            self._pieces.add(piece)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def remove(self, piece: _Piece) -> bool:
        """Return whether the piece's time was not up."""
        with self._lock:
            is_in_time = piece in self._pieces
            self._pieces.discard(piece)
        return is_in_time

    def _run(self) -> None:
        num_idle = 0
        while True:
            time.sleep(TICK_S)
            with self._lock:
                num_idle = 0 if self._pieces else num_idle + 1
                if num_idle > IDLE_TICKS:
                    self._thread = None
                    return
                for piece in [entry for entry in self._pieces if entry.clock() >= entry.until_s]:
                    self._pieces.discard(piece)
                    _raise_in(piece.thread, ctypes.py_object(TookTooLong))


_WATCH = _TimeWatch()


@contextmanager
def limit_time(most_s: float) -> Iterator[None]:
    """Raise TookTooLong in the block once its thread has computed for `most_s` seconds.

    Time in which the machine stood still does not count. It is raised between two instructions of
    Python, so one that takes long by itself runs to its end.
    """
    thread = threading.get_ident()
    clock = _clock_of(thread)
    piece = _Piece(thread, clock, clock() + most_s)
    _WATCH.add(piece)
    try:
        yield
    finally:
        if not _WATCH.remove(piece):
            _raise_in(thread, None)  # takes back what was not raised yet


def _raise_in(thread: int, error: "ctypes.py_object[type[TookTooLong]] | None") -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def _clock_of(thread: int) -> Callable[[], float]:
    """Return a clock of the thread's own time, or of all time where the system has none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number)
