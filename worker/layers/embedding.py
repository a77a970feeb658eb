"""The embedding, from token ids to hidden rows, and the head, from hidden rows to logits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.panel_linear import PanelLinear
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.linear import Linear, linear

# token_ids [tokens] int64 -> [tokens, hidden]
Embedding = Callable[[Tensor], Tensor]


class Head:
    """The model's head: hidden [rows, hidden] -> logits, float32 [rows, vocab].

    The next call may overwrite the result.
    """

    def __init__(self, product: Linear) -> None:
        self.product = product
        self._scores = torch.empty(0, 0)

    def __call__(self, hidden: Tensor) -> Tensor:
        if not isinstance(self.product, PanelLinear):
            return self.product.wide(hidden)
        rows, held = len(hidden), len(self._scores)
        if held < rows:  # megabytes: new memory costs a page fault for every thousand
            self._scores = torch.empty(max(rows, 2 * held), self.product.out_features)
        return self.product.wide(hidden, self._scores[:rows])


def embedding(weight: Tensor) -> Embedding:
    """Return the embedding of weight [vocab, hidden]."""
    return partial(torch.index_select, weight, 0)


def tied(weight: Tensor, arithmetic: Arithmetic) -> tuple[Embedding, Head]:
    """Return the embedding and the head of one weight [vocab, hidden].

    The weight is kept once where the head's panels can give its rows.
    """
    product = linear(weight, None, arithmetic)
    rows = product.rows if isinstance(product, PanelLinear) else embedding(weight)
    return rows, Head(product)
