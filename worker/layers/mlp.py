"""The feed-forward layer that every token goes through."""

from torch import Tensor

from penstock.worker.layers.linear import Linear


class MLP:
    """Two products with an activation between them: x [tokens, hidden] -> [tokens, hidden].

    Gate and up, where there are both, are one product.
    """

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up.activated(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the result plus residual, which may be overwritten."""
        return self.down.add(self.up.activated(x), residual)
