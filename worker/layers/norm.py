"""Root-mean-square normalisation with its weight."""

from torch import Tensor

from kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    """x [..., hidden] -> [..., hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised sum, and the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
