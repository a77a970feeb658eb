"""The fields of a GGUF file, of the types that they must have."""

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedModel

ARCHITECTURE = "general.architecture"


class Metadata:
    """The fields of a model.

    `number` and its kind take names without the architecture before them.
    """

    def __init__(
        self, file: Path, fields: Mapping[str, JsonValue], tensors: Collection[str] = ()
    ) -> None:
        self.file, self.fields, self.tensors = file, fields, tensors
        self.architecture = self.text(ARCHITECTURE)

    def text(self, name: str, usual: str | None = None) -> str:
        """Return a field by its whole name. Raises BrokenModel where it is no text."""
        value = self.fields.get(name, usual)
        if not isinstance(value, str):
            raise self.broken(name, value, "a text")
        return value

    def texts(self, name: str) -> list[str]:
        """Return an array by its whole name."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.broken(name, None if value is None else "something else", "texts")
        return [str(item) for item in value]

    def has(self, name: str) -> bool:
        return self._name(name) in self.fields

    def number(self, name: str, usual: float | None = None) -> float:
        value = self.fields.get(self._name(name), usual)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(self._name(name), value, "a number")
        return value

    def count(self, name: str, usual: int | None = None) -> int:
        """Return a whole number. Of an array, which has one a layer, all must be equal."""
        value = self.fields.get(self._name(name), usual)
        if isinstance(value, list):
            if len({str(item) for item in value}) != 1:
                raise UnsupportedModel(
                    f"{self.file}: {self._name(name)} differs from layer to layer, which is not "
                    "computed"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.broken(self._name(name), value, "a whole number")
        return value

    def broken(self, name: str, value: JsonValue, expected: str) -> BrokenModel:
        state = "is missing" if value is None else f"is {value!r:.60}; it must be {expected}"
        way = "convert the original again with llama.cpp's convert_hf_to_gguf.py"
        return BrokenModel(f"{self.file}: {name} {state}; {way}")

    def _name(self, name: str) -> str:
        return f"{self.architecture}.{name}"
