"""The ways of a processor to multiply: each is compiled, and what this one lacks is emulated."""

import ctypes
import os
import platform

import pytest

from paths import SUPPORT
from penstock.kernels.cpu.compile import build, digest_of
from penstock.kernels.cpu.library import load

_EMULATION = SUPPORT / "emulated.h"
_EMULATED = ("-O1", "-march=x86-64-v3", "-Wno-psabi", "-include", str(_EMULATION))
_EMULATED += (f"-DEMULATED_BY={digest_of((), _EMULATION.read_bytes())}",)  # another, other builds
WAYS = {"native": ("-O3", "-march=native")}
if platform.machine() == "x86_64":
    WAYS |= {
        "SSE2": ("-O1", "-march=x86-64"),
        "AVX-512 bf16": _EMULATED,
        "AMX": (*_EMULATED, "-DEMULATED_TILES"),
    }


@pytest.fixture(scope="session", params=WAYS)
def ops(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The operations for a way to multiply, in the cache of this user once they were compiled."""
    more = os.environ.get("PENSTOCK_TEST_OPS_FLAGS", "").split()
    flags = (*WAYS[request.param], *more)
    library = load(build(flags))
    if request.param.startswith("A"):
        assert library.prepare() == request.param.encode()
    return library
