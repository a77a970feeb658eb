"""The operations compiled ahead, for images and wheels.

Where these are used there may be no compiler, and the processor is another one.

A level is a set of features that processors have together. The first level that this processor has
is used. The levels of x86-64 are those of its psABI, and above them those that multiply bf16.
"""

import logging
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.kernels.cpu.compile import Unusable, compile_ops, digest_of, find_compiler, is_whole

_log = logging.getLogger("penstock.kernels")

FOLDER = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class Level:
    """A level of processors; `features` are named as in /proc/cpuinfo."""

    name: str
    machines: tuple[str, ...]
    features: frozenset[str]
    flags: tuple[str, ...]

    def file(self, folder: Path) -> Path:
        return folder / f"ops-{self.name}-{digest_of(self.flags)}.so"


_X86, _ARM = ("x86_64",), ("aarch64", "arm64")
_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_bf16", "amx_int8", "amx_tile"}
_BF16_FLAGS = ("-O3", "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
LEVELS = (
    Level("amx", _X86, _AMX, _AMX_FLAGS),
    Level("avx512-bf16", _X86, _BF16, _BF16_FLAGS),
    Level("avx512", _X86, _V4, ("-O3", "-march=x86-64-v4")),
    Level("avx2", _X86, _V3, ("-O3", "-march=x86-64-v3")),
    Level("sse2", _X86, frozenset(), ("-O3", "-march=x86-64", "-Wno-psabi")),
    Level("neon", _ARM, frozenset(), ("-O3",)),
)


def levels() -> list[Level]:
    """Return the levels of this kind of machine, the best first."""
    return [level for level in LEVELS if platform.machine() in level.machines]


def prebuild(choice: Sequence[Level], folder: Path = FOLDER) -> Iterator[Path]:
    """Compile the chosen levels into the folder, and yield each file.

    Older files there are removed first. Raises Unusable when a level cannot be compiled.
    """
    compiler = find_compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("ops-*"):
            old.unlink()
        for level in choice:
            compile_ops(compiler, level.flags, level.file(folder))
            yield level.file(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unusable(f"{compiler}, {folder}: {error}") from error


def prebuilt(folder: Path = FOLDER, features: frozenset[str] | None = None) -> Iterator[Path]:
    """Yield the intact libraries made of these sources for processors with these features.

    None means the features of this machine.
    """
    has = this_processors() if features is None else features
    for level in levels() if folder.is_dir() else []:
        file = level.file(folder)
        if not level.features <= has or not file.exists():
            continue
        if is_whole(file):
            yield file
        else:
            _log.warning("%s is damaged, and not used: run `penstock prebuild` again", file)


def this_processors() -> frozenset[str]:
    """Return the features of this machine's first core; none where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, words = line.partition(":")
        if name.strip() == "flags":
            return frozenset(words.split())
    return frozenset()
