"""Loads the compiled operations, made ahead or compiled for this processor.

A caller that gets None computes in torch; a line of the log says why, and what that costs.
"""

import ctypes
import functools
import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from penstock.kernels.cpu.compile import Unusable, build
from penstock.kernels.cpu.prebuilt import prebuilt

_NATIVE = ("-O3", "-march=native")
_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")

_log = logging.getLogger("penstock.kernels")


class TilesRefused(Unusable):
    """Raised when the processor has AMX, but the system gives it to no process."""


@functools.cache
def compiled_ops() -> ctypes.CDLL | None:
    """Return this processor's operations, loaded once in a process; None if there are none."""
    native = (build(flags) for flags in (_NATIVE, _NATIVE + _NO_TILES))
    complaints = []
    for libraries in (prebuilt(), native):
        try:
            return _first(libraries)
        except Unusable as error:
            complaints.append(str(error))
    _log.warning(
        "CPU operations were not compiled; torch takes several times as long: %s",
        "; ".join(complaints),
    )
    return None


def _first(libraries: Iterable[Path]) -> ctypes.CDLL:
    """Load the first library that the system allows; each one asks less of it than the last.

    Raises Unusable when there is none.
    """
    refusal = Unusable("`penstock prebuild` made none for this processor")
    for library in libraries:
        try:
            return load(library)
        except TilesRefused as error:
            refusal = error
    raise refusal


def load(path: Path) -> ctypes.CDLL:
    """Load a library, ask the system for what it needs, and declare its functions.

    Raises Unusable, or TilesRefused where the system does not give AMX.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unusable(str(error)) from error
    library.prepare.restype = ctypes.c_char_p
    way = library.prepare()
    if way is None:
        raise TilesRefused("the system does not give AMX tiles to processes")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, [_TYPES[letter] for letter in arguments]
    _log.info("CPU operations multiply by %s", way.decode())
    library.gather_team(torch.get_num_threads())
    return library


# p: an address, i: an int, f: a float
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "gather_team": (None, "i"),
    "pack": (None, "ppii"),
    "quantise_weight": (None, "pppiiii"),
    "pack_numbers": (None, "ppiiii"),
    "rows_of": (None, "pppi"),
    "linear": (ctypes.c_int, "pppii"),
    "paged_attention": (ctypes.c_int, "pppppiiipp"),
    "norm": (None, "pppiiii"),
    "rotate_and_store": (None, "pppfpppppii"),
    "choose": (None, "ppppi"),
    "experts": (ctypes.c_int, "ppppipii"),
    "run_layers": (ctypes.c_int, "pipppp"),
    "sample": (ctypes.c_int, "pppppii"),
    "mass": (ctypes.c_int, "ppii"),
}
