"""Norms of rows, with their weights."""

from torch import Tensor

from penstock.kernels.rows.norm import NormWeights, add_normalised, normalise

__all__ = ["Norm", "NormWeights"]


class Norm:
    """The norm of one layer: x [..., hidden] -> [..., hidden]."""

    def __init__(self, weights: NormWeights) -> None:
        self.weights = weights

    def __call__(self, x: Tensor) -> Tensor:
        return normalise(x, self.weights)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the normalised x plus residual, which may be overwritten."""
        return add_normalised(x, self.weights, residual)
