"""What is given to child processes so that none runs on alone."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux for a signal when the parent dies, in whatever way. Between fork and exec, or first
    of all: by then a hung process could not end itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
