"""A tie of child processes to their parent, so that none runs on alone."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux for a signal to this process when its parent dies, in whatever way.

    Call it between fork and exec, or first of all: a process that hangs later cannot end itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
