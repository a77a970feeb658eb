"""The tensors of a GGUF file by Hugging Face's names: packed as they are stored, or widened."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock.worker.layers.linear import Weight, multiplies
from penstock.worker.models.folder.errors import BrokenModel, CannotQuantise, UnsupportedModel
from penstock.worker.models.folder.gguf.architectures import architecture_of
from penstock.worker.models.folder.gguf.config import TO_CONFIG
from penstock.worker.models.folder.gguf.header import TensorPlace
from penstock.worker.models.folder.gguf.metadata import Metadata
from penstock.worker.models.folder.gguf.model import read_gguf
from penstock.worker.models.folder.gguf.packing import one_below_the_other, packed_weight
from penstock.worker.models.folder.weights import Weights

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_PLAIN_NAMES = {kind.name for kind in _PLAIN}
_EXPERT = re.compile(r"experts\.(\d+)\.")
_QUERIES_AND_KEYS = (".attn_q", ".attn_k")
_WIDE_BYTES = 2**26  # widened at a time
_log = logging.getLogger("penstock.worker.models")


class GgufWeights(Weights):
    """The tensors of a model in GGUF, mapped into memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        model = read_gguf(files)
        self._file = model.file
        self._places = model.tensors
        self._metadata = Metadata(model.file, model.fields, model.tensors)
        self._architecture = architecture_of(self._metadata)
        self._read_names = set(TO_CONFIG)
        self._bytes: dict[Path, Tensor] = {}
        self._packed_kinds = Counter[str]()
        self._widened_kinds = Counter[str]()
        self._rounds_rows = False
        for name, place in self._places.items():
            _check_kind(name, place)

    def has(self, name: str) -> bool:
        return self._stored(name)[0] in self._places

    def fill(self, target: Tensor, name: str) -> None:
        """Copy tensor `name` into target, which has its shape, and convert its type.

        Raises BrokenModel when it is missing or of another shape.
        """
        place = self._place(name, tuple(target.shape))
        if place.kind not in _PLAIN:
            self._widened_kinds[place.kind.name] += 1
        stored_name, expert = self._stored(name)
        rows = self._rows(place, expert)
        order = self._order(name, len(rows))
        has_one = self._architecture.adds_one and stored_name.endswith("norm.weight")
        columns = target.view(len(rows), -1)
        for begin, wide in _widened(rows, place.kind, order):
            columns[begin : begin + len(wide)] = wide - 1.0 if has_one else wide

    def product(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Return packed numbers as they are stored, where bf16 is multiplied with such."""
        pairs = parts.items() if dtype == torch.bfloat16 else ()
        weights = [self._packed(f"{name}.weight", (rows, in_features)) for name, rows in pairs]
        few_bits = [weight for weight in weights if weight is not None]
        if few_bits and len(few_bits) == len(parts):
            whole = one_below_the_other(few_bits).to(device)
            if multiplies(whole):
                self._packed_kinds.update(self._kind(f"{name}.weight") for name in parts)
                self._rounds_rows = whole.numbers.is_cpu
                return whole
        return super().product(parts, in_features, dtype, device)

    def _packed(self, name: str, shape: tuple[int, int]) -> Weight | None:
        place = self._place(name, shape)
        rows = self._rows(place, self._stored(name)[1])
        order = self._order(name, len(rows))
        return packed_weight(rows if order is None else rows[order], place.kind)

    def _kind(self, name: str) -> str:
        return self._places[self._stored(name)[0]].kind.name

    def refuse_other_bits(self) -> None:
        """Raise CannotQuantise where weights have few bits already."""
        kinds = sorted({place.kind.name for place in self._places.values()} - _PLAIN_NAMES)
        if kinds:
            raise CannotQuantise(f"{self._file}: its weights are {', '.join(kinds)}; leave it out")

    def _place(self, name: str, expected_shape: tuple[int, ...]) -> TensorPlace:
        """Return where a tensor, or an expert's part of one, lies. Raises BrokenModel."""
        stored_name, expert = self._stored(name)
        if stored_name not in self._places:
            raise BrokenModel(f"{self._file}: tensor {stored_name} ({name}) is missing")
        place = self._places[stored_name]
        shape = place.shape if expert is None else place.shape[1:]
        if expected_shape not in (shape, (1, *shape)):
            raise BrokenModel(
                f"{place.file}: tensor {stored_name} has shape {list(shape)}, "
                f"and the metadata asks for {list(expected_shape)}"
            )
        if expert is not None and expert >= place.shape[0]:
            raise BrokenModel(f"{place.file}: tensor {stored_name} has no expert {expert}")
        self._read_names.add(stored_name)
        return place

    def release(self) -> None:
        """Unmap the files, so that pages already copied leave this process's memory."""
        self._bytes.clear()

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Unmap the files. Raises BrokenModel where tensors were never asked for."""
        self.release()
        self._tell()
        unread_names = tuple(f"{self._architecture.stored(f'{name}x')[:-1]}" for name in unread)
        extras = sorted(
            name
            for name in self._places.keys() - self._read_names
            if not name.startswith(unread_names)
        )
        if extras:
            raise BrokenModel(
                f"{self._file}: unexpected tensor {extras[0]}, one of {len(extras)} that a model "
                f"of {self._metadata.architecture} does not have"
            )

    def dtype(self) -> torch.dtype:
        """Return the type that tensors are widened to: of a file of one float type this one."""
        kinds = {place.kind for place in self._places.values() if len(place.shape) > 1}
        if len(kinds) == 1 and kinds <= _PLAIN.keys():
            return _PLAIN[kinds.pop()]
        return torch.bfloat16

    def numbers(self, stored_name: str) -> list[float]:
        """Return the numbers of a small tensor by llama.cpp's name."""
        rows = self._rows(self._places[stored_name], None)
        pieces = _widened(rows, self._places[stored_name].kind, None)
        return [float(number) for _, wide in pieces for number in wide.flatten()]

    def _tell(self) -> None:
        if self._packed_kinds:
            how = ", by rows rounded to 8 bits" if self._rounds_rows else ""
            _log.info(
                "tensors are multiplied as they are stored%s: %s", how, _counts(self._packed_kinds)
            )
        if self._widened_kinds:
            _log.info("tensors are widened: %s", _counts(self._widened_kinds))

    def _stored(self, name: str) -> tuple[str, int | None]:
        """Return llama.cpp's name, and which expert it is of the tensor of that name."""
        module, dot, end = name.rpartition(".")
        match = _EXPERT.search(module)
        stored_name = self._architecture.stored(_EXPERT.sub("experts.", module))
        return f"{stored_name}{dot}{end}", int(match[1]) if match else None

    def _rows(self, place: TensorPlace, expert: int | None) -> Tensor:
        """Return a tensor's bytes, a row of the tensor in each row."""
        if place.file not in self._bytes:
            size = place.file.stat().st_size
            self._bytes[place.file] = torch.from_file(
                str(place.file), False, size, dtype=torch.uint8
            )
        data = self._bytes[place.file]
        if place.start + place.num_bytes > len(data):
            raise BrokenModel(f"{place.file}: it was shortened while it was read")
        data = data[place.start : place.start + place.num_bytes]
        if expert is not None:
            data = data.view(place.shape[0], -1)[expert]
        return data.view(_num_rows(place, expert), -1)

    def _order(self, name: str, num_rows: int) -> Tensor | None:
        """Return which stored row each row is; None where they lie as they are."""
        module = self._stored(name)[0].rpartition(".")[0]
        if not (self._architecture.is_paired and module.endswith(_QUERIES_AND_KEYS)):
            return None
        count = "attention.head_count"
        heads = self._metadata.count(count)
        if module.endswith(_QUERIES_AND_KEYS[1]):
            heads = self._metadata.count(f"{count}_kv", heads)
        if num_rows % (2 * heads):
            raise BrokenModel(f"{self._file}: tensor of {name} has {num_rows} rows")
        return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items()))


def _num_rows(place: TensorPlace, expert: int | None) -> int:
    """Return how many rows are read: of a vector its numbers, of a stack one expert's."""
    if len(place.shape) == 1:
        return place.shape[0] if place.kind in _PLAIN else 1
    return place.shape[-2]


def _check_kind(name: str, place: TensorPlace) -> None:
    """Raise UnsupportedModel for a type that nothing here widens."""
    if place.kind in _PLAIN:
        return
    block = torch.zeros(1, GGML_QUANT_SIZES[place.kind][1], dtype=torch.uint8)
    try:
        dequantize(block.numpy(), place.kind)
    except NotImplementedError:
        raise UnsupportedModel(
            f"{place.file}: tensor {name} is {place.kind.name}, which is not read; take a file of "
            "another type, as Q8_0 or Q4_K_M"
        ) from None


def _widened(
    rows: Tensor, kind: GGMLQuantizationType, order: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first of some rows, and what they stand for; some at a time, for memory's sake."""
    in_block, block_bytes = GGML_QUANT_SIZES[kind]
    step = max(1, _WIDE_BYTES // (4 * max(1, rows.shape[1] // block_bytes * in_block)))
    for begin in range(0, len(rows), step):
        end = min(begin + step, len(rows))
        piece = rows[begin:end].clone() if order is None else rows[order[begin:end]]
        plain = _PLAIN.get(kind)
        if plain is not None:
            yield begin, piece.view(plain)
        else:
            yield begin, torch.from_numpy(dequantize(piece.numpy(), kind))
