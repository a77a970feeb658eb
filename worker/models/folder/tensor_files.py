"""The files of a model's tensors, mapped into memory: safetensors, and those that torch wrote.

torch's are pickles, which may name any function; only what makes plain tensors is called.
"""

import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.worker.models.folder.errors import BrokenModel, reason
from penstock.worker.models.folder.files import weights_file

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_ZIP = b"PK\x03\x04"
_SAFE = "fetch the model as safetensors, or save its state_dict() again"
_ON_DAMAGE = "fetch it again"
_log = logging.getLogger("penstock.worker.models")


class TensorFile(Protocol):
    """The part of `safe_open`'s interface that is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class TorchFile(TensorFile):
    """A state that `torch.save` wrote: mapped, or in memory if it is of the form before zip."""

    def __init__(self, file: Path) -> None:
        self.is_mapped = _is_zip(file)
        self._tensors = _mapped(file) if self.is_mapped else _in_memory(file)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()


OpenFiles = tuple[dict[str, Path], dict[Path, TensorFile]]


def open_files(folder: Path, names: Sequence[str]) -> OpenFiles:
    """Return the file of each tensor, and each file opened, which its name says what it is.

    Where there is one file for all, no index is read. Raises BrokenModel.

    names  of the files or indices of which the first that is there is opened
    """
    file = weights_file(folder, names)
    if file is None:
        raise BrokenModel(f"{folder}: there is no {' or '.join(names)}; fetch the model again")
    if file.suffix == ".json":
        return _open_shards(file)
    tensors = open_file(file)
    return dict.fromkeys(tensors.keys(), file), {file: tensors}


def open_file(file: Path) -> TensorFile:
    """Open a file by what its name says it is. Raises BrokenModel."""
    if file.suffix != ".safetensors":
        return TorchFile(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"{file}: not a whole safetensors file: {error}") from error


def is_mapped(tensors: TensorFile) -> bool:
    """Return whether the file is mapped, and not in memory: to open it again costs little."""
    return not isinstance(tensors, TorchFile) or tensors.is_mapped


def _open_shards(index: Path) -> OpenFiles:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {name: index.parent / Path(shard).name for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(f"{index}: not an index of shards: {error!r}") from error
    shards = {file: open_file(file) for file in sorted(set(file_of.values()))}
    names = {file: set(tensors.keys()) for file, tensors in shards.items()}
    for name, file in file_of.items():
        if name not in names[file]:
            raise BrokenModel(f"{file}: tensor {name} is missing; {index.name} places it there")
    return file_of, shards


def _is_zip(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise BrokenModel(f"{file}: {error.strerror}") from error


def _mapped(file: Path) -> dict[str, Tensor]:
    """Map a file whose records lie in it as torch writes them.

    torch itself takes for numbers whatever lies at a record's place: packed bytes as well, and of
    a record that is too short what comes after it.
    """
    num_bytes = _num_bytes(file)
    tensors = _load(file, mmap=True)
    storages = [tensor.untyped_storage() for tensor in tensors.values() if tensor.numel()]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    if sum(sizes.values()) > num_bytes:
        raise BrokenModel(f"{file}: its tensors have more numbers than it holds; {_ON_DAMAGE}")
    return tensors


def _num_bytes(file: Path) -> int:
    """Return the bytes of all records of numbers. Raises BrokenModel for a compressed record."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise BrokenModel(f"{file}: not a whole file of torch: {error}; {_ON_DAMAGE}") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            why = "is compressed, as torch writes none"
            raise BrokenModel(f"{file}: {entry.filename} {why}; {_ON_DAMAGE}")
    return sum(entry.file_size for entry in entries if "/data/" in entry.filename)


def _in_memory(file: Path) -> dict[str, Tensor]:
    tensors = _load(file, mmap=False)
    _log.info("%s is of the form before torch 1.6, and takes its size in memory meanwhile", file)
    return tensors


def _load(file: Path, mmap: bool) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings of another protocol
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if (name := _GLOBAL.search(str(error))) is not None:
            why = f"its pickle asks for {name[1]}, and may run code"
            raise BrokenModel(f"{file}: {why}; {_SAFE}") from error
        raise BrokenModel(f"{file}: not a whole file of torch; {_ON_DAMAGE}") from error
    except Exception as error:  # many types: a pickle of damaged bytes asks for anything
        why = reason(error).partition(". ")[0]
        raise BrokenModel(f"{file}: not a whole file of torch: {why}; {_ON_DAMAGE}") from error
    return _plain_tensors(file, state)


def _plain_tensors(file: Path, state: object) -> dict[str, Tensor]:
    if not isinstance(state, Mapping):
        raise BrokenModel(
            f"{file}: it holds a {type(state).__name__}, not tensors by name; {_SAFE}"
        )
    for name, value in state.items():
        if not (isinstance(name, str) and _is_plain(value)):
            kind = type(value).__name__
            raise BrokenModel(f"{file}: {name!r:.100} is a {kind}, not a plain tensor; {_SAFE}")
    return dict(state)


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
