"""A model in GGUF: the fields of its first part, and the tensors of all."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.gguf.header import TensorPlace, read_part


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The fields of the first part, and the tensors of all."""

    file: Path
    fields: dict[str, JsonValue]
    tensors: dict[str, TensorPlace]


def read_gguf(files: Iterable[Path]) -> GgufModel:
    """Read the headers of a model's parts. Raises a ModelError."""
    first, *rest = (read_part(file) for file in files)
    tensors = dict(first.tensors)
    for number, part in enumerate(rest, 1):
        if part.fields.get("split.no") != number:
            raise BrokenModel(f"{part.file}: split.no is {part.fields.get('split.no')}; rename it")
        if copies := tensors.keys() & part.tensors.keys():
            raise BrokenModel(f"{part.file}: tensor {min(copies)} is in another part, too")
        tensors |= part.tensors
    count, total = 1 + len(rest), first.fields.get("split.tensors.count", len(tensors))
    if (split_count := first.fields.get("split.count", count)) != count:
        raise BrokenModel(
            f"{first.file}: one of {split_count} parts, which are to have the names that "
            "llama.cpp's gguf-split gives, as -00001-of-00002.gguf"
        )
    if total != len(tensors):
        raise BrokenModel(f"{first.file}: its parts have {len(tensors)} of {total} tensors")
    return GgufModel(first.file, first.fields, tensors)
