"""The files of a model's folder: which hold its weights, and what is in those of JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel

# The first that is there is read: all weights, or the index that says in which file each tensor is.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
WEIGHT_FILES = (*SAFETENSORS, "pytorch_model.bin", "pytorch_model.bin.index.json")
TEXTS = ("*.json", "*.jinja", "*.model")
OLD_WEIGHTS = "pytorch_model*.bin"  # files of torch's pickles, without their index


def weights_file(folder: Path, names: Sequence[str] = WEIGHT_FILES) -> Path | None:
    """Return the file of all weights, or the index of their shards; None where there is neither."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the weights are read from, or would be if they were there.

    None where there are no weights, or an index that is damaged, which its reader tells.
    """
    file = weights_file(folder)
    if file is None:
        return sorted(folder.glob("*.gguf"))
    if file.suffix != ".json":
        return [file]
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({folder / Path(str(name)).name for name in names})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def read_object(path: Path) -> dict[str, JsonValue]:
    """Return the object in a file. Raises BrokenModel with the file's name."""
    value = _read(path)
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: not a JSON object; fetch it again")
    return value


def read_array(path: Path) -> list[JsonValue]:
    """Return the array in a file. Raises BrokenModel with the file's name."""
    value = _read(path)
    if not isinstance(value, list):
        raise BrokenModel(f"{path}: not a JSON array; fetch it again")
    return value


def _read(path: Path) -> JsonValue:
    try:
        value: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenModel(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: not JSON: {error}; fetch it again") from error
    return value
