"""Checkpoints of few bits in the layouts of their makers, with random numbers.

Speed does not depend on the numbers. That they are read right is for the tests.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, JsonValue]


def _words(*shape: int) -> Tensor:
    """Return random words, each of eight numbers of 4 bits."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.004 + 0.001).to(dtype)


def _gptq(rows: int, columns: int, group: int) -> Tensors:
    groups = columns // group
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(groups, rows),
        "g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }


def _awq(rows: int, columns: int, group: int) -> Tensors:
    groups = columns // group
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": _words(groups, rows // 8),
        "scales": _scales(groups, rows),
    }


def _int4(rows: int, columns: int, group: int) -> Tensors:
    return {
        "weight_packed": _words(rows, columns // 8),
        "weight_scale": _scales(rows, columns // group, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _int8(rows: int, columns: int, _: int) -> Tensors:
    numbers = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return {"weight": numbers, "weight_scale": _scales(rows, 1, dtype=torch.bfloat16) / 16}


def _fp8(rows: int, columns: int, _: int) -> Tensors:
    blocks = -(-rows // 128), -(-columns // 128)
    numbers = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": _scales(*blocks, dtype=torch.float32) / 16}


def _compressed(format_name: str, weights: Mapping[str, JsonValue], group: int) -> Config:
    sizes: Config = {"group_size": group} if weights["strategy"] == "group" else {}
    whole: Config = {"type": "int", "symmetric": True, **weights, **sizes}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": whole}},
    }


# By name: what config.json says, of a group's size; and the tensors of a product.
FORMS: dict[str, tuple[Callable[[int], Config], Callable[[int, int, int], Tensors]]] = {
    "fp8, blocks of 128x128": (
        lambda _: {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        _fp8,
    ),
    "compressed-tensors W8A8": (
        partial(_compressed, "int-quantized", {"num_bits": 8, "strategy": "channel"}),
        _int8,
    ),
    "compressed-tensors W4A16": (
        partial(_compressed, "pack-quantized", {"num_bits": 4, "strategy": "group"}),
        _int4,
    ),
    "GPTQ, 4 bits": (
        lambda group: {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True},
        _gptq,
    ),
    "AWQ": (
        lambda group: {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "version": "gemm",
            "zero_point": True,
        },
        _awq,
    ),
}


def save_packed(source: Path, target: Path, name: str) -> None:
    """Write a folder of `save_shape` anew, its products in one of FORMS with random numbers.

    The group is 128, or 64 where the widths are no multiples of it.
    """
    torch.manual_seed(0)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((source / "config.json").read_text())
    group = 128 if fields["hidden_size"] % 128 == 0 else 64
    config, pack = FORMS[name]
    tensors: Tensors = {}
    for key, weight in load_file(source / "model.safetensors").items():
        if not key.endswith("proj.weight"):
            tensors[key] = weight
            continue
        module = key.removesuffix("weight")
        rows, columns = weight.shape
        tensors |= {f"{module}{end}": part for end, part in pack(rows, columns, group).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    fields["quantization_config"] = config(group)
    (target / "config.json").write_text(json.dumps(fields))
