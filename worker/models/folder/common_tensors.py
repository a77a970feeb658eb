"""Tensors that all experts of a layer have in common: [experts, ..], of one number an expert each.

A weight in such a tensor is [experts, in_features, out_features], as makers of these publish it.
"""

import re

from torch import Tensor

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)(\.weight|\.bias)?")
_ENDS = {".weight": "", ".bias": "_bias", None: ""}


def common_name(name: str) -> tuple[str, int] | None:
    """Return what the tensor of all experts is called, and the number of the expert meant.

    None for a name that is no expert's.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    experts, number, module, end = match.groups()
    return f"{experts}.{module}{_ENDS[end]}", int(number)


def part_of(tensor: Tensor, number: int, name: str) -> Tensor:
    """Return an expert's part of the tensor of all; a weight as [out_features, in_features]."""
    part = tensor[number]
    return part.mT if name.endswith(".weight") and part.ndim > 1 else part
