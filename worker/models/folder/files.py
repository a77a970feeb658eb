"""Reads the JSON files of a model's folder."""

import json
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel

INDEX = "model.safetensors.index.json"  # the file of each tensor, where there are several


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
