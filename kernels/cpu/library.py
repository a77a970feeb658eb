"""The compiled operations: made ahead or compiled for this processor, and loaded.

Who gets None computes in torch: a line of the log says why, and what that costs.
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
    """The processor has AMX, and the system gives it to nobody."""


@functools.cache
def compiled_ops() -> ctypes.CDLL | None:
    """For this processor, once a process."""
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
    """The next one asks less of the system."""
    refusal = Unusable("`penstock prebuild` made none for this processor")
    for library in libraries:
        try:
            return load(library)
        except TilesRefused as error:
            refusal = error
    raise refusal


def load(path: Path) -> ctypes.CDLL:
    """Loads a library, asks the system for what it needs, and declares its functions."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unusable(str(error)) from error
    library.prepare.restype = ctypes.c_char_p
    way = library.prepare()
    if way is None:
        raise TilesRefused("the system does not give AMX tiles to processes")
    for name, (returned, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, [_TYPES[letter] for letter in arguments]
    _log.info("CPU operations multiply by %s", way.decode())
    library.gather_team(torch.get_num_threads())
    return library


# p: an address, i: an int, f: a float
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "gather_team": (None, "i"),
    "pack": (None, "ppii"),
    "quantise_weight": (None, "pppiiii"),
    "rows_of": (None, "pppi"),
    "linear": (ctypes.c_int, "pppii"),
    "paged_attention": (ctypes.c_int, "pppppiiiiiifip"),
    "rms_norm": (None, "pppiif"),
    "rotate_and_store": (None, "pppfpppppiiiii"),
    "run_layers": (ctypes.c_int, "pipppp"),
    "sample": (ctypes.c_int, "pppppii"),
    "mass": (ctypes.c_int, "ppii"),
}
