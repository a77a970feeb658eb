"""Weights in MXFP4, as gpt-oss is published (OCP Microscaling Formats 1.0): e2m1, 32 a scale.

Twice such a number is a whole one of -12 to 12, so they are integers of eight bits here.
"""

import torch
from torch import Tensor

from penstock.worker.layers.linear import Weight
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.integers import Tensors

GROUP = 32  # numbers that share a scale
_NAN = 255
# Halves of powers of two: the numbers here are twice as large.
_SCALES = torch.tensor([2.0 ** (power - 128) for power in range(_NAN + 1)])
_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of three bits; the fourth is the sign
_NUMBERS = torch.tensor([*_SIZES, *(-size for size in _SIZES)], dtype=torch.int8)
_BYTES = torch.arange(256)
# By a byte the two numbers in it, the one in its low bits first, as one of 16 bits.
_PAIRS = torch.stack((_NUMBERS[_BYTES & 15], _NUMBERS[_BYTES >> 4]), -1).view(torch.int16).flatten()


def mxfp4_weight(module: str, shape: tuple[int, int], tensors: Tensors) -> Weight | None:
    """Return a module's weight [rows, columns]; None where it is not of such numbers.

    They are in `_blocks` [rows, columns / 32, 16] uint8, and exponents of two in `_scales`
    [rows, columns / 32]. Raises BrokenModel where they are not.
    """
    if not tensors.has(f"{module}_blocks"):
        return None
    rows, columns = shape
    groups = -(-columns // GROUP)
    blocks = _octets(tensors, f"{module}_blocks", (rows, groups, GROUP // 2))
    powers = _octets(tensors, name := f"{module}_scales", (rows, groups))
    if columns % GROUP:
        raise BrokenModel(f"{tensors.place(name)}: {columns} columns are not groups of {GROUP}")
    if (powers == _NAN).any():
        raise BrokenModel(f"{tensors.place(name)} has a scale of {_NAN}, which is no number")
    pairs = _PAIRS.index_select(0, blocks.flatten().to(torch.int32))
    scales = _SCALES.index_select(0, powers.flatten().to(torch.int32)).view(powers.shape)
    return Weight(pairs.view(torch.int8).view(shape), scales, GROUP, columns)


def _octets(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
    if not tensors.has(name):
        raise BrokenModel(f"tensor {name} is missing beside the others of its module")
    tensor = tensors.tensor(name)
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise BrokenModel(
            f"{tensors.place(name)} is {kind} {list(tensor.shape)}, not uint8 {list(shape)}"
        )
    return tensor
