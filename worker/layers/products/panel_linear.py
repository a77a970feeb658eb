"""Products with a weight of 16, 8 or 4 bits on a CPU, by the compiled operations."""

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import After, PanelWeight
from penstock.worker.layers.products.product import Linear, Pass


class PanelLinear(Linear):
    """A product: x [rows, in_features] bf16 -> [rows, out_features], by panels of the weight.

    A row's bits are the same whatever rows come with it, in every pass.
    """

    panels: PanelWeight

    def __init__(self, panels: PanelWeight) -> None:
        super().__init__(None, None)
        self.panels = panels

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        out = x.new_empty(len(x), self.panels.out_features)
        return self.panels.multiply(x, out, After.NARROW)

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        """Add the product to residual [rows, out_features], contiguous, in place; return it."""
        return self.panels.multiply(x, residual, After.ADD)

    def wide(self, x: Tensor, pass_: Pass) -> Tensor:
        """Return the product in float32, never rounded to bf16."""
        out = x.new_empty(len(x), self.panels.out_features, dtype=torch.float32)
        return self.panels.multiply(x, out, After.WIDE)

    def activated(self, x: Tensor, pass_: Pass) -> Tensor:
        out = x.new_empty(len(x), self.panels.out_features)
        return self.panels.multiply(x, out, self.panels.activation)
