"""The embedding, from token ids to hidden rows, and the head, from hidden rows to logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.linear.panel_weight import After
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.linear import Linear, Weight, linear
from penstock.worker.layers.products.product import Pass

# token_ids [tokens] int64 -> [tokens, hidden]
Embedding = Callable[[Tensor], Tensor]


class Head:
    """The model's head: hidden [rows, hidden] -> logits, float32 [rows, vocab].

    The next call may overwrite the result.

    softcap  a logit becomes softcap * tanh(logit / softcap); None leaves it as it is
    """

    def __init__(self, product: Linear, softcap: float | None = None) -> None:
        self.product = product
        self._softcap = softcap
        self._scores = torch.empty(0, 0)

    def __call__(self, hidden: Tensor, pass_: Pass) -> Tensor:
        scores = self._product(hidden, pass_)
        cap = self._softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def _product(self, hidden: Tensor, pass_: Pass) -> Tensor:
        panels = self.product.panels
        if panels is None:
            return self.product.wide(hidden, pass_)
        rows, capacity = len(hidden), len(self._scores)
        if capacity < rows:  # megabytes: new memory costs a page fault for every thousand
            self._scores = torch.empty(max(rows, 2 * capacity), panels.out_features)
        return panels.multiply(hidden, self._scores[:rows], After.WIDE)


def tied(
    weight: Weight, arithmetic: Arithmetic, factor: float = 1.0, softcap: float | None = None
) -> tuple[Embedding, Head]:
    """Return the embedding and the head of one weight [vocab, hidden].

    The weight is kept once where the head's panels can give its rows.

    factor, softcap  what is done to the logits
    """
    product = linear(weight, None, arithmetic, factor=factor)
    source = product.panels or product.weight or weight
    return source.rows, Head(product, softcap)
