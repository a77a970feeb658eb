"""A look at the kernel's own list of connections."""

from pathlib import Path


def is_probed(port: int, peer: int) -> bool:
    """Return whether the kernel probes the connection at `port`: its timer is of kind 2."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [timer] = [
        each[5]
        for each in lines
        if (each[1][9:], each[2][9:]) == (f"{port:04X}", f"{peer:04X}") and each[3] == "01"
    ]
    return timer.startswith("02:")
