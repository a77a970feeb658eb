"""Numbers of float8: fp8, fbgemm_fp8, modelopt, and compressed-tensors of that kind."""

import torch
from torch import Tensor

from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.packed import PackedForm

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# What the names of scales end with, after the name of the module.
SCALE_NAMES = ("weight_scale_inv", "weight_scale")


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
