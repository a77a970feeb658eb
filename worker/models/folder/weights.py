"""The sources of a model's tensors: the files of its folder, or random numbers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.worker.layers.attention import NO_SCALES, KvScales
from penstock.worker.layers.linear import Weight, joined, multiplies
from penstock.worker.models.contract.spec import LoadFormat
from penstock.worker.models.folder.common_tensors import common_name, part_of
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.files import SAFETENSORS, WEIGHT_FILES
from penstock.worker.models.folder.float8 import FP8_TYPES, SCALE_NAMES, widened
from penstock.worker.models.folder.four_bits import four_bit_rows
from penstock.worker.models.folder.integers import packed_weight
from penstock.worker.models.folder.kv_scales import ENDS as KV_SCALES
from penstock.worker.models.folder.kv_scales import kv_scales
from penstock.worker.models.folder.mxfp4 import mxfp4_weight
from penstock.worker.models.folder.packed import PackedForm
from penstock.worker.models.folder.tensor_files import (
    TensorFile,
    is_mapped,
    open_file,
    open_files,
)

# Ends of names of what old checkpoints hold and rope or attention compute, of scales that only a
# cache of 8 bits would use, and of those that only products in float8 would.
_NEEDLESS = (
    "rotary_emb.inv_freq", ".masked_bias", *KV_SCALES,
    ".input_scale", ".input_scale_ub", ".activation_scale",
)  # fmt: skip
# What goes before the names of a text's tensors in the folder of a model that sees: before those
# of "model.", and before the head's.
_TEXT_ROOTS = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("model.text_model.", ""),
    ("thinker.model.", "thinker."),
    ("model.", ""),
)


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

    def kv_scales(self, module: str) -> KvScales:
        """Return the scales of an attention's module, for a cache of fp8."""
        return NO_SCALES

    def release(self) -> None:
        """Give back what was only needed to read."""
        return

    def finish(self, unread: Sequence[str] = ()) -> None:
        self.release()


class SafetensorsWeights(Weights):
    """The tensors of a folder, in one file or in the shards that its index names.

    sees         of a model that sees, the tensors of its text alone, by the names that they have
                 in a model of text
    packed_form  that of weights of few bits

    widened_modules  those whose packed numbers nothing multiplies as they are
    """

    def __init__(
        self,
        path: Path,
        sees: bool = False,
        packed_form: PackedForm | None = None,
        load_format: LoadFormat = "auto",
    ) -> None:
        self._packed_form = packed_form
        names = SAFETENSORS if load_format == "safetensors" else WEIGHT_FILES
        self._file_of, self._open = open_files(path, names)
        stored = self._file_of
        self._stored_name = _text_names(stored) if sees else {name: name for name in stored}
        self._read_names: set[str] = set()
        self.widened_modules: list[str] = []

    def has(self, name: str) -> bool:
        return self._whole(name)[0] in self._stored_name

    def fill(self, target: Tensor, name: str) -> None:
        """Copy tensor `name` into target, which has its shape, and convert its type.

        Raises BrokenModel when it is missing, damaged or of another shape.
        """
        rows = self._rows(name, tuple(target.shape)) if self._packed_form else None
        if rows is not None:
            target.copy_(rows)
            return
        if not self.has(name):
            files = ", ".join(sorted({file.name for file in self._file_of.values()}))
            raise BrokenModel(f"tensor {name} is missing from {files}")
        tensor = self.tensor(name)
        if tensor.shape != target.shape:
            raise BrokenModel(
                f"{self.place(name)} has shape {list(tensor.shape)}, "
                f"and the configuration asks for {list(target.shape)}"
            )
        if tensor.dtype in FP8_TYPES and self._packed_form:
            tensor = self._widened(tensor, name, self._packed_form)
        target.copy_(tensor)

    def product(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Return packed numbers as they are where all parts have such, and bf16 is multiplied."""
        has_integers = self._packed_form is not None and self._packed_form.integers is not None
        if has_integers and dtype == torch.bfloat16:
            weights = [
                self._packed(f"{name}.weight", (rows, in_features)) for name, rows in parts.items()
            ]
            integers = [weight for weight in weights if weight is not None]
            whole = joined(integers) if len(integers) == len(weights) else None
            if whole is not None and multiplies(on_device := whole.to(device)):
                return on_device
            self.widened_modules += parts if integers else ()
        return super().product(parts, in_features, dtype, device)

    def kv_scales(self, module: str) -> KvScales:
        return kv_scales(self, module)

    def _packed(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or self._packed_form is None:
            return None
        sides = shape[0], shape[1]
        if self._packed_form.method == "mxfp4":
            return mxfp4_weight(module, sides, self)
        return packed_weight(module, sides, self._packed_form, self)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return what packed numbers stand for, float32; None where a tensor is not of them."""
        weight = self._packed(name, shape)
        if weight is not None:
            return weight.rows(slice(None), torch.float32)
        module = name.removesuffix(".weight")
        return four_bit_rows(module, (shape[0], shape[1]), self) if len(shape) == 2 else None

    def _widened(self, numbers: Tensor, name: str, form: PackedForm) -> Tensor:
        module = name.removesuffix("weight")
        scale_name = next(
            (f"{module}{end}" for end in SCALE_NAMES if self.has(f"{module}{end}")), None
        )
        if scale_name is None:
            ends = " or ".join(SCALE_NAMES)
            raise BrokenModel(f"{self.place(name)} is float8, and has no {ends}")
        return widened(numbers, self.tensor(scale_name), form, self._stored_name[scale_name])

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is there. Raises BrokenModel."""
        whole, number = self._whole(name)
        stored_name = self._stored_name[whole]
        file = self._file_of[stored_name]
        try:
            tensor = self._opened(file).get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{file}: tensor {stored_name}: {error}") from error
        parts = tensor.shape[0] if tensor.ndim else 0
        if number is None or number == parts - 1:  # the last: all were read
            self._read_names.add(whole)
        if number is None:
            return tensor
        if number >= parts:
            raise BrokenModel(f"{self.place(name)} is not there: it has {parts} parts")
        return part_of(tensor, number, name)

    def _whole(self, name: str) -> tuple[str, int | None]:
        """Return the tensor that has what `name` says, and which part; None where it is all."""
        common = None if name in self._stored_name else common_name(name)
        return common if common and common[0] in self._stored_name else (name, None)

    def place(self, name: str) -> str:
        """Return a tensor's file and its name there, for a message."""
        whole, number = self._whole(name)
        stored_name = self._stored_name[whole]
        of_part = "" if number is None else f" of expert {number}"
        return f"{self._file_of[stored_name]}: tensor {stored_name}{of_part}"

    def release(self) -> None:
        """Unmap the files, so that pages already copied leave this process's memory."""
        self._open = {file: opened for file, opened in self._open.items() if not is_mapped(opened)}

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Close the files. Raises BrokenModel where tensors were never asked for.

        unread  the beginnings of the names of those that nobody needs
        """
        extras = sorted(
            self._stored_name[name]
            for name in set(self._stored_name) - self._read_names
            if not (
                name.endswith(_NEEDLESS)
                or name.startswith(tuple(unread))
                or (name.endswith(".bias") and not self.tensor(name).any())
            )
        )
        self._open.clear()
        if extras:
            raise BrokenModel(
                f"{self._file_of[extras[0]]}: unexpected tensor {extras[0]}, one of {len(extras)} "
                "that the configuration does not account for"
            )

    def dtype(self) -> torch.dtype:
        """Return the type of the first tensor; of packed ones the type that they are widened to."""
        name = next(iter(self._stored_name.values()))
        dtype = self._opened(self._file_of[name]).get_tensor(name).dtype
        is_packed = dtype in FP8_TYPES or not dtype.is_floating_point
        return torch.bfloat16 if self._packed_form and is_packed else dtype

    def _opened(self, file: Path) -> TensorFile:
        if file not in self._open:
            self._open[file] = open_file(file)
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


def _text_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Return the names of a text's tensors in a model of text -> in the folder of one that sees."""
    names = dict.fromkeys(stored_names)
    for root, head in _TEXT_ROOTS:
        if f"{root}embed_tokens.weight" in names:
            text = {
                f"model.{name.removeprefix(root)}": name for name in names if name.startswith(root)
            }
            heads = {
                name.removeprefix(head): name
                for name in names
                if name.startswith(f"{head}lm_head.")
            }
            return text | heads
    raise BrokenModel(f"tensor embed_tokens.weight is below none of {', '.join(dict(_TEXT_ROOTS))}")
