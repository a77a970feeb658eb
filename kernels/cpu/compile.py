"""Compiles the C sources to a library for this processor, kept in the user's cache."""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from penstock.kernels.cpu.cache_folder import own_folder, user_cache

_SOURCES = Path(__file__).parent
_OPS = _SOURCES / "ops.c"
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-pthread", "-shared", "-fPIC", "-lm")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120

_log = logging.getLogger("penstock.kernels")


class Unusable(Exception):
    """Raised when there are no compiled operations; the message says why."""


def build(flags: Sequence[str], cache: Path | None = None, source: Path = _OPS) -> Path:
    """Return the library compiled with these flags, from the cache if it is intact there.

    Otherwise compile it into the cache. Raises Unusable when that fails.
    """
    compiler = find_compiler()
    folder = own_folder(cache or user_cache())
    try:
        library = folder / f"{source.stem}-{_digest(compiler, flags, source)}.so"
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole(library):
                compile_ops(compiler, flags, library, source)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unusable(f"{compiler}, {folder}: {error}") from error
    return library


def find_compiler() -> str:
    """Return a C compiler's absolute path; $CC goes first. Raises Unusable if there is none."""
    for name in (os.environ.get("CC", ""), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise Unusable(f"no C compiler; install one ({', '.join(_COMPILERS)}) or name it in CC")


def digest_of(flags: Sequence[str], *extra: bytes) -> str:
    """Return the digest of all that decides what is compiled.

    That is the sources, the flags, the kind of machine, and `extra`.
    """
    parts = [" ".join(flags).encode(), platform.machine().encode(), *extra]
    parts += [file.read_bytes() for file in sorted(_SOURCES.glob("*.[ch]"))]
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()


def _digest(compiler: str, flags: Sequence[str], source: Path) -> str:
    """Return the digest with the compiler and the processor, on which `-march=native` depends."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILE_S)
    return digest_of(flags, version.stdout, _processor(), source.read_bytes())


def _processor() -> bytes:
    """Return the lines of /proc/cpuinfo that tell the first core's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"\n")
    except OSError:
        return platform.processor().encode()
    prefixes = (b"model", b"cpu family", b"flags", b"Features", b"CPU ")
    return b"\n".join(line for line in lines if line.startswith(prefixes))


def is_whole(library: Path) -> bool:
    """Return whether the file is as it was compiled.

    A truncated file kills the process that loads it.
    """
    try:
        return library.with_suffix(".sum").read_text() == _checksum(library)
    except OSError:
        return False


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def compile_ops(compiler: str, flags: Sequence[str], library: Path, source: Path = _OPS) -> None:
    """Compile to `library`, and write its checksum beside it.

    Raises Unusable, OSError or SubprocessError.
    """
    fresh = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, str(source), "-o", str(fresh), *_FLAGS]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)
        if result.returncode:
            raise Unusable(f"{' '.join(command)}: {result.stderr.strip()[-500:]}")
        library.with_suffix(".sum").write_text(_checksum(fresh))
        fresh.replace(library)
    finally:
        fresh.unlink(missing_ok=True)
