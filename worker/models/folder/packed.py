"""Weights of few bits, as others publish them: which forms are read, and what their numbers are."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import JsonValue
from torch import Tensor

from penstock.worker.models.folder.errors import BrokenModel, UnsupportedField

FIELD = "quantization_config"
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# What the names of scales end with, after the name of the module.
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_METHOD = f"{FIELD}.quant_method"
_EXPECTED = (
    "float8 weights (fp8, fbgemm_fp8, and compressed-tensors and modelopt of that kind) or models "
    "without it"
)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of a checkpoint's packed weights.

    block  the rows and columns of a weight that share a scale; None: a row's or all numbers do
    """

    method: str
    block: tuple[int, int] | None = None


def packed_form(fields: Mapping[str, JsonValue]) -> PackedForm | None:
    """Return the form that a configuration names; None: weights are as they are.

    Raises UnsupportedField for one that is not read.
    """
    config = fields.get(FIELD)
    if config is None:
        return None
    if not isinstance(config, dict):
        raise UnsupportedField(FIELD, config, _EXPECTED)
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else ""))
    if method == "compressed-tensors":
        return PackedForm(method, _of_compressed_tensors(config))
    if method == "modelopt" and not str(config.get("quant_algo")).startswith("FP8"):
        raise UnsupportedField(f"{FIELD}.quant_algo", config.get("quant_algo"), _EXPECTED)
    if method not in ("fp8", "fbgemm_fp8", "modelopt"):
        raise UnsupportedField(_METHOD, method or config, _EXPECTED)
    return PackedForm(method, _block(f"{FIELD}.weight_block_size", config.get("weight_block_size")))


def _of_compressed_tensors(config: Mapping[str, JsonValue]) -> tuple[int, int] | None:
    groups, transforms = config.get("config_groups"), config.get("transform_config")
    if transforms:
        raise UnsupportedField(f"{FIELD}.transform_config", transforms, "weights as they are")
    block = None
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        field = f"{FIELD}.config_groups.{name}.weights"
        if not isinstance(weights, dict):
            raise UnsupportedField(field, weights, _EXPECTED)
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            kind = f"{weights.get('type')}{weights.get('num_bits')}"
            raise UnsupportedField(field, kind, _EXPECTED)
        block = _block(f"{field}.block_structure", weights.get("block_structure")) or block
    return block


def _block(field: str, value: JsonValue) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise UnsupportedField(field, value, "blocks of [rows, columns]")


def widened(numbers: Tensor, scales: Tensor, form: PackedForm, name: str) -> Tensor:
    """Return what float8 numbers [rows, columns] stand for, in float32.

    scales  one; one a row, [rows] or [rows, 1]; or one a block. Raises BrokenModel for another
            shape, which names the tensor `name`.
    """
    wide, rows = numbers.float(), len(numbers)
    scales = scales.float()
    if scales.numel() == 1:
        return wide.mul_(scales.view(1, 1))
    if scales.shape in ((rows,), (rows, 1)):
        return wide.mul_(scales.view(rows, 1))
    height, width = form.block or (0, 0)
    if form.block is None or scales.shape != (-(-rows // height), -(-wide.shape[1] // width)):
        expected = (
            f"one a row or one a block of {form.block}" if form.block else "one, or one a row"
        )
        raise BrokenModel(
            f"tensor {name} has shape {list(scales.shape)}; of a weight of {list(numbers.shape)} "
            f"scales are {expected}"
        )
    for begin in range(0, rows, height):  # a row of blocks at a time
        of_columns = scales[begin // height].repeat_interleave(width)[: wide.shape[1]]
        wide[begin : begin + height] *= of_columns
    return wide
