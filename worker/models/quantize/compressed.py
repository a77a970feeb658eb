"""The tensors of a rounded weight, by compressed-tensors' names."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.worker.models.quantize.rounding import FLOAT8, Rounded
from penstock.worker.models.quantize.scheme import Scheme

_WORD = 32  # bits of an int32, which holds several numbers, the first in its lowest


def compressed(weight: Rounded, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that stand for a module's weight, by their names in it.

    dtype  of scales
    """
    tensors = {"weight_scale": weight.grid.scale.to(dtype)}
    if scheme.format != "pack-quantized":
        numbers = weight.numbers.to(FLOAT8 if scheme.is_float else torch.int8)
        return {"weight": numbers, **tensors}
    tensors["weight_packed"] = packed(weight.numbers, scheme.bits)
    tensors["weight_shape"] = torch.tensor(weight.numbers.shape)
    if not scheme.is_symmetric:
        zeros = packed(weight.grid.zero.t(), scheme.bits).t().contiguous()
        tensors["weight_zero_point"] = zeros
    return tensors


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers with a sign [rows, columns] as int32 [rows, ceil(columns * bits / 32)].

    They are counted from the least one; a last word is filled with zeros.
    """
    count = _WORD // bits
    counts = (numbers + 2 ** (bits - 1)).to(torch.int64)
    counts = F.pad(counts, (0, -counts.shape[1] % count)).view(len(numbers), -1, count)
    places = torch.arange(0, _WORD, bits, device=numbers.device)
    words = (counts << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
