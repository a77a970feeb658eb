"""What stays in memory: pieces of regions that the system may hold in huge pages."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.numbers.huge_pages import take

_MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pieces_are_zero_aligned_and_apart() -> None:
    pieces = [take(size) for size in (1, 100, 3 * _MIB, 70 * _MIB, 64, 40 * _MIB, 30 * _MIB)]
    for number, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % 64 == 0
        assert not piece[:: max(1, len(piece) // 1000)].any()
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))


def test_the_system_may_hold_it_in_huge_pages() -> None:
    """Private, and advised where the system has them: shared memory would get none."""
    address = take(8 * _MIB).data_ptr()
    asked = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            is_its = begin <= address < end
            assert not is_its or words[1] == "rw-p"
        elif words[0] == "VmFlags:" and is_its:
            asked.append("hg" in words)
    assert asked == [Path("/sys/kernel/mm/transparent_hugepage").exists()]


def test_only_what_is_written_takes_memory_and_only_while_it_is_held() -> None:
    before = resident_bytes()
    piece = take(256 * _MIB)
    assert resident_bytes() - before < 16 * _MIB
    piece[: 128 * _MIB] = 1
    assert 120 * _MIB < resident_bytes() - before < 144 * _MIB
    del piece
    gc.collect()
    assert resident_bytes() - before < 16 * _MIB


FAULTS = """
import resource, sys, torch
from penstock.kernels.numbers.huge_pages import keep_freed

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(20):  # the first ones take what later ones have
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**26, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_freed_memory_is_kept_for_what_comes_next() -> None:
    faults = {
        way: int(subprocess.check_output([sys.executable, "-c", FAULTS, way]))
        for way in ("kept", "usual")
    }
    # With huge pages a tensor of 64 MiB costs 32 or more, with small ones 16,384.
    assert faults["kept"] < 16 < 32 <= faults["usual"], faults
