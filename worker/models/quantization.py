"""The setting `quantization`: what is to be made of weights, or vLLM's name for what they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from penstock.worker.layers.choices import Quantization, QuantizationSetting
from penstock.worker.models.folder.errors import CannotQuantise
from penstock.worker.models.folder.files import read_object
from penstock.worker.models.folder.gguf.files import gguf_files
from penstock.worker.models.folder.packed import method_of, packed_form

_CHOICES: tuple[Quantization, ...] = get_args(Quantization)
# vLLM names kernels too; here the form alone decides which product multiplies it.
_SAME: Mapping[str, str] = {"gptq_marlin": "gptq", "awq_marlin": "awq", "inc": "auto-round"}


def quantization_to_make(path: Path, setting: QuantizationSetting | None) -> Quantization | None:
    """Return what a worker is to make of the weights of a folder; None: they stay as they are.

    The name of a method asks that the weights have that form, as vLLM's flag does; so does fp8
    where they are of it. Raises CannotQuantise where they are of another, or are integers already.
    """
    if setting is None:
        return None
    method, is_float8 = _method(path)
    for name in _CHOICES:
        if name == setting:
            return None if is_float8 and name == "fp8" else _choice(name, method, is_float8)
    if _SAME.get(setting, setting) != method:
        kind = "as they are" if method is None else method
        raise CannotQuantise(f"{setting}: the weights of {path} are {kind}; leave it out")
    return None


def _method(path: Path) -> tuple[str | None, bool]:
    """Return the form of a folder's weights, and whether it is one of float8."""
    if gguf_files(path):
        return "gguf", False  # who reads it says whether its numbers may be rounded
    fields = read_object(path / "config.json")
    form = packed_form(fields)
    return method_of(fields), form is not None and form.is_float8


def _choice(name: Quantization, method: str | None, is_float8: bool) -> Quantization:
    if is_float8 or method in (None, "gguf"):
        return name
    raise CannotQuantise(f"{name}: the weights are {method} already; leave it out")
