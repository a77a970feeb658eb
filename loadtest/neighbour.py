"""A neighbour on the machine: `python -m loadtest.neighbour SHARE` takes that share of one core."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.parent import end_with_parent

_PERIOD_S = 0.02


@contextmanager
def busy(share: float) -> Iterator[None]:
    """While it is entered others take this share of all cores together."""
    of_one_core = share * (os.cpu_count() or 1)
    shares = [1.0] * int(of_one_core) + [of_one_core % 1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "loadtest.neighbour", str(each)], preexec_fn=end_with_parent
        )
        for each in shares
        if each
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(share: float) -> None:
    """In bursts, each as long as it takes to get the share."""
    begin_s = time.perf_counter()
    while True:
        while time.process_time() < share * (time.perf_counter() - begin_s):
            pass
        time.sleep(_PERIOD_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
