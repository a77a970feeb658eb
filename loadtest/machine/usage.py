"""The CPU and memory that processes use, read from Linux's /proc.

A figure says little without them.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

_LOOK_S = 0.25
_LISTENS = "0A"
_FEATURES = (
    "amx_bf16",
    "amx_int8",
    "avx512_bf16",
    "avx512_vnni",
    "avx512f",
    "avx2",
    "asimd",
    "bf16",
)
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the user and system time of one process since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def family(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(child))]


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Have others' processes and their descendants stand still: an idle server may use the CPU."""
    families = [family(pid) for pid in pids]
    members = [pid for group in families if os.getpid() not in group for pid in group]
    try:
        _signal(members, signal.SIGSTOP)
        yield
    finally:
        _signal(members, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def module_of(pid: int) -> str:
    """Return the module after `-m` in a process's command line; empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return ""
    return words[words.index("-m") + 1] if "-m" in words else ""


def listener(port: int) -> int | None:
    """Return the process of this machine that listens on a port; None where it cannot be found."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(link.readlink()) in sockets:
                return int(link.parts[2])
    return None


def description() -> dict[str, object]:
    """Return a description of this machine, as far as its speed depends on it."""
    fields = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", os.uname().machine),
        "family": fields.get("cpu family", ""),
        "model": fields.get("model", ""),
        "cores": os.cpu_count() or 1,
        "features": [name for name in _FEATURES if name in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


class Neighbours:
    """Measures the CPU that others use while it is entered; `share` is their part of all cores.

    Others are all processes but this one, `also`, and the descendants of the two. Time that a
    virtual machine's host takes for itself counts as others'. `peak_bytes` is the most memory that
    was resident in our processes without this one. It adds the most that each living one ever had,
    so pages that they share count in each.
    """

    def __init__(self, also: int | None = None) -> None:
        self.peak_bytes = 0
        self._also = also
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
        machine_s, family_s = _machine_s(), self._ours()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_S)
            before_s, before = machine_s, family_s
            machine_s, family_s = _machine_s(), self._ours()
            own_s = sum(used_s - before.get(pid, 0.0) for pid, used_s in family_s.items())
            self._others_s += max(0.0, machine_s - before_s - own_s)
            resident = sum(memory_bytes(pid, "VmHWM") for pid in family_s if pid != os.getpid())
            self.peak_bytes = max(self.peak_bytes, resident)

    def _ours(self) -> dict[int, float]:
        used_s = {}
        for pid in [*family(os.getpid()), *(family(self._also) if self._also else [])]:
            with suppress(OSError):
                used_s[pid] = cpu_s(pid)
        return used_s


def _machine_s() -> float:
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, words)
    return (user + nice + system + irq + soft + steal) / _TICKS


def memory_bytes(pid: int, of: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the memory that a process has now (VmRSS), or the most that it had (VmHWM)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(of):
                return int(line.split()[1]) * 1024
    return 0
