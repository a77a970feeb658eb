"""The feed-forward layer that every token goes through."""

from torch import Tensor

from penstock.kernels.rows.activation import LIMIT, SWISH
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.products.product import Pass

__all__ = ["LIMIT", "MLP", "SWISH"]


class MLP:
    """Two products with an activation between them: x [tokens, hidden] -> [tokens, hidden].

    Gate and up, where there are both, are one product.
    """

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        return self.down(self.up.activated(x, pass_), pass_)

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        """Return the result plus residual, which may be overwritten."""
        return self.down.add(self.up.activated(x, pass_), residual, pass_)
