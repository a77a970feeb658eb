"""Weights of integers, in the layouts of GPTQ, AWQ, compressed-tensors and bitsandbytes.

An int32 holds several numbers, the first in its lowest bits. Rows below are a weight's: features
that come out; its columns are those that go in.
"""

from typing import Protocol

import torch
from torch import Tensor

from penstock.worker.layers.linear import Weight
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.packed import BITS, PackedForm

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the columns 0, 1, .. are


class Tensors(Protocol):
    """The tensors of a folder, by their names."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is there. Raises BrokenModel."""

    def place(self, name: str) -> str:
        """Return its file and its name there, for a message."""


def packed_weight(
    module: str, shape: tuple[int, int], form: PackedForm, tensors: Tensors
) -> Weight | None:
    """Return the integers of a module's weight [rows, columns]; None where it has none.

    Raises BrokenModel where its tensors do not fit one another.
    """
    if tensors.has(f"{module}.qweight"):
        read = _awq if form.method == "awq" else _gptq
        return read(module, shape, form, tensors)
    if tensors.has(f"{module}.weight_packed"):
        return _compressed(module, shape, form, tensors)
    if tensors.has(f"{module}.weight") and form.integers:
        return _eighths(module, shape, form, tensors)
    return None


def _gptq(module: str, shape: tuple[int, int], form: PackedForm, tensors: Tensors) -> Weight:
    """Read qweight [columns / n, rows], qzeros [groups, rows / n], scales [groups, rows], g_idx."""
    rows, columns = shape
    scales = _checked(tensors, name := f"{module}.scales", (None, rows)).t().float()
    group = _group(columns, scales.shape[1], tensors.place(name), form)
    words = _checked(tensors, f"{module}.qweight", (None, rows))
    bits = _bits(tensors, f"{module}.qweight", len(words), columns)
    numbers = unpacked(words.t().contiguous(), bits, columns)
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if tensors.has(name := f"{module}.qzeros"):
        zero_words = _checked(tensors, name, (scales.shape[1], -(-rows * bits // 32)))
        zeros = unpacked(zero_words, bits, rows).t().float() + form.zeros_lack
    order = None
    if tensors.has(name := f"{module}.g_idx"):
        order = _order(_checked(tensors, name, (columns,)), group, tensors.place(name))
    return _weight(numbers, scales, zeros, group, bits, order)


def _awq(module: str, shape: tuple[int, int], form: PackedForm, tensors: Tensors) -> Weight:
    """Read qweight [columns, rows / 8], qzeros [groups, rows / 8], scales [groups, rows]."""
    rows, columns = shape
    scales = _checked(tensors, name := f"{module}.scales", (None, rows)).t().float()
    group = _group(columns, scales.shape[1], tensors.place(name), form)
    words = _checked(tensors, f"{module}.qweight", (columns, -(-rows // 8)))
    zero_words = _checked(tensors, f"{module}.qzeros", (scales.shape[1], -(-rows // 8)))
    numbers, zeros = (
        _in_awq_order(unpacked(tensor, 4, rows)).t() for tensor in (words, zero_words)
    )
    return _weight(numbers.contiguous(), scales, zeros.float(), group, 4, None)


def _compressed(module: str, shape: tuple[int, int], form: PackedForm, tensors: Tensors) -> Weight:
    """Read weight_packed [rows, columns / n], weight_scale [rows, groups], weight_zero_point."""
    rows, columns = shape
    whole = tensors.tensor(f"{module}.weight_shape").tolist()
    if whole != [rows, columns]:
        raise BrokenModel(
            f"{tensors.place(f'{module}.weight_shape')} is {whole}, "
            f"and the configuration asks for {[rows, columns]}"
        )
    words = _checked(tensors, f"{module}.weight_packed", (rows, None))
    bits = _bits(tensors, f"{module}.weight_packed", words.shape[1], columns)
    scales = _scales(tensors, name := f"{module}.weight_scale", rows)
    group = _group(columns, scales.shape[1], tensors.place(name), form)
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if tensors.has(name := f"{module}.weight_zero_point"):
        if tensors.tensor(name).dtype == torch.int32:
            zero_words = _checked(tensors, name, (-(-rows * bits // 32), scales.shape[1]))
            zeros = unpacked(zero_words.t(), bits, rows).t().float()
        else:
            zeros = zeros + _checked(tensors, name, tuple(scales.shape)).float()
    order = None
    if tensors.has(name := f"{module}.weight_g_idx"):
        order = _order(_checked(tensors, name, (columns,)), group, tensors.place(name))
    return _weight(unpacked(words, bits, columns), scales, zeros, group, bits, order)


def _eighths(
    module: str, shape: tuple[int, int], form: PackedForm, tensors: Tensors
) -> Weight | None:
    """Read weight [rows, columns] int8, weight_scale [rows, groups] or SCB [rows], 127 times it."""
    numbers = tensors.tensor(f"{module}.weight")
    if numbers.dtype != torch.int8:
        return None
    numbers = _checked(tensors, f"{module}.weight", shape)
    if tensors.has(name := f"{module}.SCB"):
        scales = _checked(tensors, name, (shape[0],)).float().view(-1, 1) / 127
    else:
        scales = _scales(tensors, name := f"{module}.weight_scale", shape[0])
    group = _group(shape[1], scales.shape[1], tensors.place(name), form)
    mins = None
    if tensors.has(name := f"{module}.weight_zero_point"):
        zeros = _scales(tensors, name, shape[0])
        mins = scales * zeros if zeros.any() else None
    return Weight(numbers, scales, group, shape[1], mins)


def _weight(
    numbers: Tensor, scales: Tensor, zeros: Tensor, group: int, bits: int, order: Tensor | None
) -> Weight:
    """Return a weight of numbers without a sign, and zero points that count from their least."""
    if order is not None:
        numbers = numbers[:, order]
    usual = 2 ** (bits - 1)
    is_usual = bool((zeros == usual).all())
    if bits == 4:
        mins = None if is_usual else scales * zeros
        return Weight.of_nibbles(numbers, scales, group, mins, order)
    numbers = (numbers.to(torch.int16) - usual).to(torch.int8)
    mins = None if is_usual else scales * (zeros - usual)
    return Weight(numbers, scales, group, numbers.shape[1], mins, order)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the numbers, uint8 [rows, count], in words [rows, ceil(count * bits / 32)] int32."""
    octets = words.contiguous().view(torch.uint8)
    parts = [(octets >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(1)[:, :count]


def _in_awq_order(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)


def _order(groups: Tensor, size: int, place: str) -> Tensor | None:
    """Return the columns in the order of their groups; None where they are in it.

    groups  [columns]: the group of each, of `size` columns but for the last. Raises BrokenModel
            where others are of another size.
    """
    groups = groups.to(torch.int64)
    order = groups.argsort(stable=True)
    usual = torch.arange(len(groups))
    if not torch.equal(groups[order], usual // size):
        raise BrokenModel(f"{place} does not give groups of {size} columns each")
    return None if torch.equal(order, usual) else order


def _scales(tensors: Tensors, name: str, rows: int) -> Tensor:
    """Return scales [rows, groups]; there may be one for all, or one a row without its group."""
    scales = tensors.tensor(name).float()
    if scales.numel() == 1:
        return scales.view(1, 1).expand(rows, 1).contiguous()
    if scales.ndim == 1:
        scales = scales.view(-1, 1)
    if scales.ndim != 2 or len(scales) != rows:
        raise BrokenModel(
            f"{tensors.place(name)} has shape {list(scales.shape)}, not [{rows}, groups]"
        )
    return scales


def _bits(tensors: Tensors, name: str, words: int, count: int) -> int:
    """Return how many bits each of `count` numbers has in so many words. Raises BrokenModel."""
    bits = next((bits for bits in BITS if -(-count * bits // 32) == words), None)
    if bits is None:
        raise BrokenModel(f"{tensors.place(name)} has {words} int32 for {count} numbers")
    return bits


def _group(columns: int, groups: int, place: str, form: PackedForm) -> int:
    """Return the columns of a group: the configuration's number, or another that divides all.

    Of the former the last group may have fewer. Raises BrokenModel.
    """
    usual = form.integers.group if form.integers else None
    if usual and groups == -(-columns // usual):
        return usual
    if groups == 0 or columns % groups:
        raise BrokenModel(
            f"{place} has {groups} groups for {columns} columns, which they do not divide"
        )
    return columns // groups


def _checked(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """Return a tensor of this shape, where None is any size. Raises BrokenModel."""
    if not tensors.has(name):
        raise BrokenModel(f"tensor {name} is missing beside the others of its module")
    tensor = tensors.tensor(name)
    fits = tensor.ndim == len(shape) and all(
        limit in (None, size) for limit, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BrokenModel(f"{tensors.place(name)} has shape {list(tensor.shape)}, not [{sizes}]")
    return tensor
