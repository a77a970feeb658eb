"""FP8 numbers (e4m3): a sign, four bits of the exponent and three of the mantissa.

The largest is 448, which stands for all that is larger. NaN stays NaN.
"""

import torch
from torch import Tensor

from penstock.kernels.numbers.device import on_gpu

FP8 = torch.float8_e4m3fn
MOST_FP8 = 448.0


def as_fp8(x: Tensor) -> Tensor:
    return x.clamp(-MOST_FP8, MOST_FP8).to(FP8)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [rows, width] in fp8 and their scales [rows, 1] float32; x is contiguous.

    A row's largest number becomes 448. A row with NaN or infinity gets some NaN.
    """
    if on_gpu(x):
        # Imported here: not every platform without a GPU has triton.
        from penstock.kernels.numbers.fp8_triton import quantise_rows_triton

        return quantise_rows_triton(x)
    return quantise_rows_ref(x)


def quantise_rows_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True) / MOST_FP8
    scales = scales.masked_fill(scales == 0, 1.0)
    return as_fp8(wide / scales), scales
