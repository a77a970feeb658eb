"""From token ids to rows, and from rows to a score for each token id."""

import torch
from torch import Tensor

from worker.layers.linear import Linear


class Embedding:
    """token_ids [tokens] int64 -> [tokens, hidden]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)


class Head:
    """hidden [rows, hidden] -> float32 [rows, vocab]. Tied: built from the embedding's weight."""

    def __init__(self, weight: Tensor, deterministic: bool) -> None:
        self.linear = Linear(weight, None, deterministic)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).to(torch.float32)
