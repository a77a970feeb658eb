"""The attention of one layer over the paged cache, and the plan that all layers share."""

from dataclasses import dataclass, field

from torch import Tensor

from penstock.kernels.paged_attention import Attend, plan_attention
from penstock.kernels.rotate_and_store import HeadNorms, Places, Store, plan_store
from penstock.kernels.spans import HeadShape, Scoring, Spans
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.norm import RMSNorm
from penstock.worker.layers.rotary import RotaryTable

__all__ = ["Attention", "HeadShape", "PassPlan", "Scoring", "plan_pass", "spans_of"]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The work that the layers of one forward pass share; the first layer that asks computes it."""

    places: Places
    spans: Spans
    deterministic: bool
    _stores: dict[HeadShape, Store] = field(default_factory=dict)
    _attends: dict[tuple[HeadShape, int | None], Attend] = field(default_factory=dict)

    def store(self, shape: HeadShape, kv_cache: Tensor) -> Store:
        if shape not in self._stores:
            self._stores[shape] = plan_store(self.places, shape, kv_cache)
        return self._stores[shape]

    def attend(self, shape: HeadShape, kv_cache: Tensor, window: int | None) -> Attend:
        if (shape, window) not in self._attends:
            self._attends[shape, window] = plan_attention(
                self.spans, shape, kv_cache, window, self.deterministic
            )
        return self._attends[shape, window]


def spans_of(batch: Batch) -> Spans:
    return Spans(
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        batch.max_query_len,
        batch.max_context_len,
    )


def plan_pass(batch: Batch, table: RotaryTable, deterministic: bool) -> PassPlan:
    places = Places(*table.rows(batch.positions, batch.max_context_len), batch.slot_mapping)
    return PassPlan(places, spans_of(batch), deterministic)


class Attention:
    """The attention of one layer; it also stores the keys and values in the cache.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> [tokens, heads * head_dim]
    """

    def __init__(
        self,
        shape: HeadShape,
        scoring: Scoring,
        query_norm: RMSNorm | None,
        key_norm: RMSNorm | None,
    ) -> None:
        self.shape = shape
        self.scoring = scoring
        self.norms = None
        if query_norm and key_norm:
            self.norms = HeadNorms(query_norm.weight, key_norm.weight, key_norm.eps)

    def __call__(self, qkv: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        query = plan.store(self.shape, kv_cache)(qkv, self.norms, kv_cache)
        attend = plan.attend(self.shape, kv_cache, self.scoring.window)
        return attend(query, kv_cache, self.scoring).view(qkv.shape[0], -1)
