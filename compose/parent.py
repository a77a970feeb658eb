"""What is given to child processes so that none runs on alone."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Between fork and exec: ask Linux for SIGTERM when the parent dies, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
