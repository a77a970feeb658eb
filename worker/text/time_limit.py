"""A limit on the processor's time that a piece of Python may take."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    """Raised in what has computed for as long as it may."""


@contextmanager
def limit_time(most_s: float) -> Iterator[None]:
    """Raise TookTooLong in the block once its thread has computed for `most_s` seconds.

    Time in which the machine stood still does not count. It is raised between two instructions of
    Python, so one that takes long by itself runs to its end.
    """
    is_over, lock, thread = threading.Event(), threading.Lock(), threading.get_ident()
    clock = _clock_of(thread)
    until_s = clock() + most_s

    def watch() -> None:
        while (left_s := until_s - clock()) > 0:
            if is_over.wait(left_s):
                return
        with lock:
            if not is_over.is_set():
                _raise_in(thread, ctypes.py_object(TookTooLong))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
        _raise_in(thread, None)  # takes back what was not raised yet


def _raise_in(thread: int, error: "ctypes.py_object[type[TookTooLong]] | None") -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def _clock_of(thread: int) -> Callable[[], float]:
    """Return a clock of the thread's own time, or of all time where the system has none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number)
