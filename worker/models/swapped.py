"""Products of transformers' modules computed as our own decoder computes them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.embedding import Embedding, Head, tied
from penstock.worker.layers.linear import Linear, linear


class SwappedLinear(nn.Module):
    """A plain `nn.Linear` whose weight lies as our products read it; x [..., in_features]."""

    def __init__(self, product: Linear, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._product = product
        # Some modules ask a weight for its type and shape; its numbers are not here.
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")
        self.bias = None if plain.bias is None else plain.bias.data

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._product(rows).view(*x.shape[:-1], self.out_features)


class SwappedHead(nn.Module):
    """A head whose logits are float32; the next call may overwrite them."""

    def __init__(self, head: Head, plain: nn.Linear) -> None:
        super().__init__()
        self._head = head
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._head(rows).view(*x.shape[:-1], self.out_features)


class SwappedEmbedding(nn.Module):
    """An embedding that has its rows from a head's weight."""

    def __init__(self, rows: Embedding, plain: nn.Embedding) -> None:
        super().__init__()
        self._rows = rows
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx = plain.padding_idx
        self.weight = plain.weight.new_empty(plain.weight.shape, device="meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        return self._rows(token_ids.reshape(-1)).view(*token_ids.shape, self.embedding_dim)


def swap_products(model: Any, arithmetic: Arithmetic) -> None:
    """Swap the model's plain products for ours, one by one, so that memory holds each once.

    A module of a subclass may compute something else, and stays.
    """
    _swap_ends(model, arithmetic)
    for parent, name, plain in list(_plain(model)):
        weight, bias = plain.weight.data, None if plain.bias is None else plain.bias.data
        setattr(parent, name, SwappedLinear(linear(weight, bias, arithmetic), plain))
        plain.weight.data = torch.empty(0)


def products_of(model: Any) -> dict[str, nn.Linear]:
    """Return the products that are swapped, by the names of their weights."""
    return {f"{name}.weight": each for name, each in model.named_modules() if _is_plain(each)}


def _swap_ends(model: Any, arithmetic: Arithmetic) -> None:
    head, rows = model.get_output_embeddings(), model.get_input_embeddings()
    if not _is_plain(head) or head.bias is not None:
        return
    of_head = arithmetic.of_head()
    if type(rows) is nn.Embedding and rows.weight is head.weight:
        swapped_rows, swapped = tied(head.weight.data, of_head)
        model.set_input_embeddings(SwappedEmbedding(swapped_rows, rows))
    else:
        swapped = Head(linear(head.weight.data, None, of_head))
    model.set_output_embeddings(SwappedHead(swapped, head))


def _plain(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_plain(child):
                yield parent, name, child


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear
