"""Root-mean-square normalisation with its weight."""

from torch import Tensor

from penstock.kernels.rms_norm import rms_norm


class RMSNorm:
    """The norm of one layer: x [..., hidden] -> [..., hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
