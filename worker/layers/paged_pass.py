"""Paged attention of a pass whose modules hand over queries, keys and values of their own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.spans import HeadShape, Scoring
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.forward_pass import PassPlan, spans_of


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """One layer's attention. Keys and values lie in `shape.head_dim` numbers, filled by zeros."""

    shape: HeadShape
    value_dim: int
    scoring: Scoring


@dataclass(frozen=True, slots=True, eq=False)
class StatePart:
    """Sequences with a state that one call of a module computes: `count` tokens of each.

    tokens      their places in the packed row
    rows        their states; those of a slice are changed in place
    is_new      whether they have no state yet
    num_tokens  of the whole packed row
    """

    tokens: slice | Tensor
    rows: slice | Tensor
    is_new: bool
    num_tokens: int


class PagedPass:
    """A pass over the paged caches.

    parts  of the pass, for modules with states; None where no state is needed
    """

    def __init__(
        self,
        batch: Batch,
        layers: list[PagedLayer],
        kv_caches: list[Tensor],
        backend: Backend,
        parts: list[StatePart] | None = None,
    ) -> None:
        self.parts = parts
        self.plan = PassPlan(False, (), batch.slot_mapping, spans_of(batch), backend)
        self._layers = iter(zip(layers, kv_caches, strict=True))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [1, tokens, heads, value_dim]; the others are [1, heads, tokens, head_dim]."""
        layer, kv_cache = next(self._layers)
        shape, tokens = layer.shape, query.shape[2]
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = query.new_empty(tokens, heads + 2 * kv_heads, shape.head_dim)
        for rows, part in zip(
            torch.split(qkv, [heads, kv_heads, kv_heads], 1), (query, key, value), strict=True
        ):
            width = part.shape[3]
            rows[..., :width] = part[0].transpose(0, 1)
            rows[..., width:] = 0
        query_rows = self.plan.store(shape, kv_cache, None)(qkv.view(tokens, -1), None, kv_cache)
        attend = self.plan.attend(shape, kv_cache, layer.scoring.window)
        out = attend(query_rows, kv_cache, layer.scoring)[None, ..., : layer.value_dim]
        return out.contiguous()  # modules rely on it
