"""The interface of every product with a weight matrix, in whatever way it is computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import PanelWeight
from penstock.kernels.linear.weight import Weight
from penstock.kernels.rows.activation import Activation, activate, activate_rowwise


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, as products are given it beside their rows.

    deterministic  a row's result is bitwise the same whatever is computed beside it
    """

    deterministic: bool


class Linear(ABC):
    """A product: x [tokens, in_features] -> [tokens, out_features], both contiguous.

    weight      as the device keeps it; None where another layout was made of it
    panels      that layout, where it is what compiled operations read
    activation  of what `activated` returns
    factor      by which the product with its bias is multiplied
    """

    panels: PanelWeight | None = None

    def __init__(
        self,
        weight: Weight | None,
        bias: Tensor | None,
        activation: Activation | None = None,
        factor: float = 1.0,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.activation, self.factor = activation, factor

    @abstractmethod
    def __call__(self, x: Tensor, pass_: Pass) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor, pass_: Pass) -> Tensor:
        """Return the product plus residual [tokens, out_features], which may be overwritten."""
        return residual.add_(self(x, pass_))

    def wide(self, x: Tensor, pass_: Pass) -> Tensor:
        """Return the product in float32."""
        return self(x, pass_).to(torch.float32)

    def activated(self, x: Tensor, pass_: Pass) -> Tensor:
        """Return what the product's activation makes of it, as `kernels.rows.activation` has it."""
        assert self.activation is not None, "who makes the product says what becomes of it"
        how = activate_rowwise if pass_.deterministic else activate
        return how(self(x, pass_), self.activation)
