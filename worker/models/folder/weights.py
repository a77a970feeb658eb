"""The sources of a model's tensors: safetensors files mapped into memory, or random numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.worker.layers.linear import Weight
from penstock.worker.models.folder.errors import BrokenModel

_INDEX = "model.safetensors.index.json"


class Weights(Protocol):
    """A source of tensors, each asked for once; `finish` raises where some were never asked for.

    It takes the beginnings of names that nobody needs.
    """

    def has(self, name: str) -> bool:
        return False

    def fill(self, target: Tensor, name: str) -> None: ...

    def product(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Return the weight of several modules as one product, each below the one before.

        parts  module name -> number of its rows
        """
        numbers = torch.empty(sum(parts.values()), in_features, dtype=dtype, device=device)
        for name, rows in zip(parts, torch.split(numbers, list(parts.values())), strict=True):
            self.fill(rows, f"{name}.weight")
        return Weight.dense(numbers)

    def release(self) -> None:
        """Give back what was only needed to read."""
        return

    def finish(self, unread: Sequence[str] = ()) -> None:
        self.release()


class _File(Protocol):
    """The part of `safe_open`'s interface that is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsWeights(Weights):
    """The tensors of a folder, in one file or in the shards that its index names."""

    def __init__(self, path: Path) -> None:
        self._file_of = _locate(path)
        self._open: dict[Path, _File] = {}
        self._read_names: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def fill(self, target: Tensor, name: str) -> None:
        """Copy tensor `name` into target, which has its shape, and convert its type.

        Raises BrokenModel when it is missing, damaged or of another shape.
        """
        file = self._file_of.get(name)
        if file is None:
            files = ", ".join(sorted({file.name for file in self._file_of.values()}))
            raise BrokenModel(f"tensor {name} is missing from {files}")
        try:
            tensor = self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{file}: tensor {name}: {error}") from error
        if tensor.shape != target.shape:
            raise BrokenModel(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, "
                f"and the configuration asks for {list(target.shape)}"
            )
        target.copy_(tensor)
        self._read_names.add(name)

    def release(self) -> None:
        """Unmap the files, so that pages already copied leave this process's memory."""
        self._open.clear()

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Unmap the files. Raises BrokenModel where tensors were never asked for.

        unread  the beginnings of the names of those that nobody needs
        """
        self.release()
        extras = sorted(
            name
            for name in set(self._file_of) - self._read_names
            # The first are in old checkpoints, and rope computes them.
            if not (name.endswith("rotary_emb.inv_freq") or name.startswith(tuple(unread)))
        )
        if extras:
            raise BrokenModel(
                f"{self._file_of[extras[0]]}: unexpected tensor {extras[0]}, one of {len(extras)} "
                "that the configuration does not account for"
            )

    def dtype(self) -> torch.dtype:
        """Return the type of the first tensor."""
        name, file = next(iter(self._file_of.items()))
        return self._handle(file).get_tensor(name).dtype

    def _handle(self, file: Path) -> _File:
        if file not in self._open:
            self._open[file] = _map(file)
        return self._open[file]


class DummyWeights(Weights):
    """Random tensors: normal numbers of a fixed seed; norms are ones, biases zeros."""

    def __init__(self, std: float) -> None:
        self._std = std
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, target: Tensor, name: str) -> None:
        if name.lower().endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            device = target.device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(0)
            numbers = torch.randn(target.shape, generator=self._generators[device], device=device)
            target.copy_(numbers * self._std)


class ShapesOfWeights(Weights):
    """Gives no numbers, and notes what was asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def fill(self, target: Tensor, name: str) -> None:
        self.shapes[name] = tuple(target.shape)


def _locate(path: Path) -> dict[str, Path]:
    """Return the file that holds each tensor."""
    if (path / _INDEX).exists():
        return _shards(path)
    file = path / "model.safetensors"
    if not file.exists():
        raise BrokenModel(
            f"{path}: neither model.safetensors nor {_INDEX} is there; {_advice(path)}"
        )
    return dict.fromkeys(_map(file).keys(), file)


def _advice(path: Path) -> str:
    if any(path.glob("*.bin*")):
        code = "from transformers import AutoModelForCausalLM as A; "
        code += "A.from_pretrained(p, dtype='auto').save_pretrained(p)"
        return f"make them of the .bin files: python -c \"p = '{path}'; {code}\""
    return (
        "fetch the model again; of files in another form transformers' save_pretrained makes them"
    )


def _shards(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        file_of = {name: path / Path(shard).name for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(f"{path / _INDEX}: not an index of shards: {error!r}") from error
    for file in sorted(set(file_of.values())):
        names = set(_map(file).keys())
        for name in (name for name, home in file_of.items() if home == file):
            if name not in names:
                raise BrokenModel(f"{file}: tensor {name} is missing; {_INDEX} places it there")
    return file_of


def _map(file: Path) -> _File:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"{file}: not a whole safetensors file: {error}") from error
