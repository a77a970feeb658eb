"""A neighbour: a process that uses a share of one core.

python -m penstock.loadtest.lab.machine.neighbour SHARE
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.loadtest.machine.usage import cpu_s
from penstock.schemas.process.parent import end_with_parent

_PERIOD_S = 0.02


@dataclass(slots=True)
class Busy:
    """The share of all cores that neighbours got, known when they have ended."""

    share: float = 0.0


@contextmanager
def busy(share: float) -> Iterator[Busy]:
    """Run neighbours that want this share of all cores together, until the block ends."""
    usage, begin_s = Busy(), time.monotonic()
    cores = os.cpu_count() or 1
    of_one_core = share * cores
    shares = [1.0] * int(of_one_core) + [of_one_core % 1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock.loadtest.lab.machine.neighbour", str(part)],
            preexec_fn=end_with_parent,
        )
        for part in shares
        if part
    ]
    try:
        yield usage
    finally:
        used_s = sum(cpu_s(process.pid) for process in processes)
        usage.share = used_s / (time.monotonic() - begin_s) / cores
        for process in processes:
            process.kill()
            process.wait()


def main(share: float) -> None:
    """Use the share in bursts, each as long as it takes to reach the share."""
    begin_s = time.perf_counter()
    while True:
        while time.process_time() < share * (time.perf_counter() - begin_s):
            pass
        time.sleep(_PERIOD_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
