"""The one place of this room that asks where a tensor lives."""

from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda
