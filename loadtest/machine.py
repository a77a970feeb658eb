"""Who used the CPU: a figure of a shared machine says little without it. Linux's /proc."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_LOOK_S = 0.25
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of one process since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def family(pid: int) -> list[int]:
    """A process and all that came of it and lives."""
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(child))]


def module_of(pid: int) -> str:
    """What a Python process was started to run: `-m` of its command line, or nothing."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index("-m") + 1] if "-m" in words else ""


class Neighbours:
    """While it is entered, looks at who uses the CPU; `share` is that of all cores used by others.

    Others are neither this process nor what came of it; what a virtual machine's host takes away
    for itself counts too.
    """

    def __init__(self) -> None:
        self._others_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._ended_s = time.monotonic()

    @property
    def share(self) -> float:
        return self._others_s / ((self._ended_s - self._began_s) * (os.cpu_count() or 1))

    def _look(self) -> None:
        machine_s, ours = _machine_s(), _ours()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_S)
            before_s, before = machine_s, ours
            machine_s, ours = _machine_s(), _ours()
            own_s = sum(used_s - before.get(pid, 0.0) for pid, used_s in ours.items())
            self._others_s += max(0.0, machine_s - before_s - own_s)


def _machine_s() -> float:
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, words)
    return (user + nice + system + irq + soft + steal) / _TICKS


def _ours() -> dict[int, float]:
    used_s = {}
    for pid in family(os.getpid()):
        with suppress(OSError):
            used_s[pid] = cpu_s(pid)
    return used_s
