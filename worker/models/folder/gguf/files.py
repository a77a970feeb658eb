"""The files of a model in GGUF: one, or the parts that a large one is split into."""

import re
from pathlib import Path

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedModel
from penstock.worker.models.folder.files import OLD_WEIGHTS

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BESIDE = "mmproj"  # begins the names of towers that see or hear, which text does without
_OTHER_WEIGHTS = ("*.safetensors", OLD_WEIGHTS)


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def gguf_files(path: Path) -> list[Path]:
    """Return the parts of the model that a path names: a part, or a folder with one such model.

    There are none in a folder with weights in a form that is read before this one. Raises
    BrokenModel where a part is missing, or a folder has several models.
    """
    if is_gguf(path):
        return _parts(path)
    if any(next(path.glob(pattern), None) for pattern in _OTHER_WEIGHTS):
        return []
    files = [file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(_BESIDE)]
    firsts = sorted({_parts_of(file)[0] for file in files})
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:8])
        raise BrokenModel(f"{path}: {len(firsts)} models in GGUF; name one of them: {names}")
    return _parts(firsts[0]) if firsts else []


def refuse_gguf(folder: Path, way: str) -> None:
    """Raise UnsupportedModel where a folder's weights are in GGUF, with the way on."""
    if files := gguf_files(folder):
        raise UnsupportedModel(
            f"{files[0].resolve()}: a model in GGUF is computed by our own decoder alone; {way}"
        )


def _parts(file: Path) -> list[Path]:
    parts = _parts_of(file)
    missing_files = [part for part in parts if not part.is_file()]
    if missing_files:
        raise BrokenModel(
            f"{missing_files[0]}: missing, as {len(missing_files)} of {len(parts)} parts are; "
            "fetch the model again"
        )
    return parts


def _parts_of(file: Path) -> list[Path]:
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    stem, count = match["stem"], int(match["count"])
    return [file.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
