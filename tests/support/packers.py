"""Folders with products packed by the layouts' definitions, beside what they then stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
Packed = tuple[dict[str, Tensor], Tensor]  # a module's tensors, and what they stand for
Pair = Callable[[str, Tensor], Packed]


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return numbers [rows, n] in int32, `32 / bits` of a row in each, the first lowest."""
    each = 32 // bits
    columns = numbers.to(torch.int64).view(len(numbers), -1, each)
    places = order or tuple(range(each))
    total = sum(columns[..., column] << bits * place for place, column in enumerate(places))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def rounded(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [rows, columns], and scales and zero points [rows, groups]."""
    numbers = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().float()
        zero = (-low / scale).round().clamp(1, 2**bits - 1)
        numbers[:, groups == group] = (part / scale + zero).round().clamp(0, 2**bits - 1).long()
        scales.append(scale[:, 0])
        zeros.append(zero[:, 0])
    return numbers, torch.stack(scales, 1), torch.stack(zeros, 1)


def by_gptq(module: str, weight: Tensor, bits: int = 4, by_activity: bool = False) -> Packed:
    columns = weight.shape[1]
    groups = torch.arange(columns) // GROUP
    if by_activity:  # modules of one input have one order
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    numbers, scales, zeros = rounded(weight, bits, groups)
    dense = (numbers - zeros[:, groups]) * scales[:, groups]
    tensors = {
        "qweight": words(numbers, bits).t().contiguous(),
        "qzeros": words(zeros.t() - 1, bits),
        "scales": scales.t().half().contiguous(),
        "g_idx": groups.int(),
        "bias": torch.zeros(len(weight)),  # as old packers have it where a model has none
    }
    return tensors, dense


def by_awq(module: str, weight: Tensor) -> Packed:
    groups = torch.arange(weight.shape[1]) // GROUP
    numbers, scales, zeros = rounded(weight, 4, groups)
    dense = (numbers - zeros[:, groups]) * scales[:, groups]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(numbers.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().half().contiguous(),
    }
    return tensors, dense


def pack(source: Path, target: Path, config: dict[str, object], pair: Pair) -> Path:
    """Write the folder with its products packed; `source` keeps what they then stand for."""
    target.mkdir()
    dense: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        dense[name] = packed[name] = weight
        if name.endswith("proj.weight"):
            module = name.removesuffix("weight")
            tensors, dense[name] = pair(module, weight)
            del packed[name]
            packed = {f"{module}{end}": tensor for end, tensor in tensors.items()} | packed
    save(dense, source)
    save(packed, target)
    fields = json.loads((source / "config.json").read_text()) | {"dtype": "float16"}
    (target / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return target


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
