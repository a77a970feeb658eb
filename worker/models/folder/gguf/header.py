"""Reads the header of a GGUF file: its fields, and where its tensors lie.

Nothing that a header claims is believed before the file is seen to hold it.
"""

import math
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedModel

_MAGIC, _POINTER = b"GGUF", b"version "
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# By the number of a type of metadata, its letter of `struct`.
_LETTERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
# Above what any model has.
_MAX_FIELDS = 2**16
_MAX_TENSORS = 2**20
_MAX_ITEMS = 2**24  # in an array: a vocabulary or its merges
_MAX_TEXT_BYTES = 2**26
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # bytes between tensors' places, where the file names no other
_AGAIN = "fetch it again"
_CONVERT = "convert the original again with llama.cpp's convert_hf_to_gguf.py"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies.

    shape  as torch has it: the numbers of the last dimension lie side by side
    start  the first byte in the file
    """

    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufPart:
    """The header of one file."""

    file: Path
    fields: dict[str, JsonValue]
    tensors: dict[str, TensorPlace]


def read_part(file: Path) -> GgufPart:
    """Read a file's header. Raises a ModelError that names the file and what is wrong."""
    try:
        with file.open("rb") as stream:
            if not stream.seek(0, 2):
                raise BrokenModel(f"{file}: an empty file; {_AGAIN}")
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
                return _Header(file, data).read()
    except OSError as error:
        raise BrokenModel(f"{file}: {error.strerror}") from error


class _Header:
    """The bytes of a file, read in order."""

    def __init__(self, file: Path, data: mmap) -> None:
        self._file = file
        self._data = data
        self._at = 0

    def read(self) -> GgufPart:
        self._check_form()
        num_tensors = self._count(_MAX_TENSORS, "tensors")
        num_fields = self._count(_MAX_FIELDS, "fields")
        fields: dict[str, JsonValue] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in fields:
                raise self._broken(f"field {name} stands there twice")
            fields[name] = self._value(name, self._number("I"))
        entries = dict(self._entry() for _ in range(num_tensors))
        if len(entries) < num_tensors:
            raise self._broken("two tensors have one name")
        tensors = self._places(entries, self._alignment(fields))
        return GgufPart(self._file, fields, tensors)

    def _check_form(self) -> None:
        magic = self._data[: len(_POINTER)]
        if magic == _POINTER:
            folder = self._file.parent
            raise BrokenModel(
                f"{self._file}: a pointer of Git LFS, not the file; run `git lfs pull` in {folder}"
            )
        if not magic.startswith(_MAGIC):
            raise self._broken("not a GGUF file: it does not begin with GGUF", _AGAIN)
        self._at = len(_MAGIC)
        version = self._number("I")
        if version & 0xFFFF == 0:
            way = "gguf-convert-endian of the package gguf turns them"
            raise UnsupportedModel(
                f"{self._file}: its numbers are big-endian, for another kind of processor; {way}"
            )
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._file}: version {version} of GGUF; versions 2 and 3 are read; {_CONVERT}"
            )

    def _alignment(self, fields: dict[str, JsonValue]) -> int:
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}; it must be a power of two")
        return alignment

    def _places(
        self, entries: dict[str, tuple[tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, TensorPlace]:
        base, places = -(-self._at // alignment) * alignment, dict[str, TensorPlace]()
        for name, (shape, kind, offset) in entries.items():
            places[name] = self._place(name, shape, kind, base + offset)
        before = None
        for name in sorted(places, key=lambda name: places[name].start):
            start = places[name].start
            if before and start < places[before].start + places[before].num_bytes:
                raise self._broken(f"tensor {name} lies over tensor {before}")
            if (start - base) % alignment:
                raise self._broken(
                    f"tensor {name} begins at {start}, which is no multiple of its alignment"
                )
            before = name
        return places

    def _place(self, name: str, shape: tuple[int, ...], number: int, start: int) -> TensorPlace:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(
                f"{self._file}: tensor {name} is of type {number}, which is not known here; "
                "a newer version of the package gguf may know it"
            ) from None
        in_block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or not all(shape) or shape[-1] % in_block:
            raise self._broken(f"tensor {name} of {kind.name} has shape {list(shape)}")
        num_bytes = math.prod(shape) // in_block * block_bytes
        if start + num_bytes > len(self._data):
            raise self._broken(
                f"tensor {name} ends at byte {start + num_bytes} of {len(self._data)}", _AGAIN
            )
        return TensorPlace(self._file, kind, shape, start, num_bytes)

    def _entry(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Return a tensor's name, and its shape, type and offset."""
        name, num = self._text(), self._number("I")
        if num > _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name} has {num} dimensions")
        return name, (self._take(f"{num}Q")[::-1], self._number("I"), self._number("Q"))

    def _value(self, name: str, kind: int) -> JsonValue:
        if kind == _ARRAY:
            return self._array(name)
        if kind == _STRING:
            return self._text()
        if kind not in _LETTERS:
            raise self._broken(f"field {name} is of type {kind}, which there is not")
        value: JsonValue = self._take(_LETTERS[kind])[0]
        return value

    def _array(self, name: str) -> JsonValue:
        kind, num = self._number("I"), self._count(_MAX_ITEMS, f"items of {name}")
        if kind == _STRING:
            return [self._text() for _ in range(num)]
        if kind not in _LETTERS:
            raise self._broken(f"field {name} is an array of type {kind}, which is not read")
        return list(self._take(f"{num}{_LETTERS[kind]}"))

    def _text(self) -> str:
        length = self._count(_MAX_TEXT_BYTES, "bytes of a text")
        end = self._at + length
        if end > len(self._data):
            raise self._cut()
        try:
            text = self._data[self._at : end].decode()
        except UnicodeDecodeError:
            raise self._broken("a text is not UTF-8") from None
        self._at = end
        return text

    def _count(self, most: int, noun: str) -> int:
        count = self._number("Q")
        if count > most:
            raise self._broken(f"{count} {noun}, of which {most} are the most")
        return count

    def _number(self, letter: str) -> int:
        return int(self._take(letter)[0])

    def _take(self, letters: str) -> tuple[int, ...]:
        try:
            numbers = struct.unpack_from(f"<{letters}", self._data, self._at)
        except struct.error:
            raise self._cut() from None
        self._at += struct.calcsize(f"<{letters}")
        return numbers

    def _cut(self) -> BrokenModel:
        return self._broken(f"it ends within its header, at byte {len(self._data)}", _AGAIN)

    def _broken(self, reason: str, way: str = _CONVERT) -> BrokenModel:
        return BrokenModel(f"{self._file}: {reason}; {way}")
