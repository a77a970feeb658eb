"""The attention of one layer over the paged cache, and the plan that all layers share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.kernels.paged_attention import Attend, plan_attention
from penstock.kernels.rotate_and_store import HeadNorms, Places, Rotation, Store, plan_store
from penstock.kernels.spans import HeadShape, Scoring, Spans
from penstock.kernels.store_kv import key_rows
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.rotary import RotaryTable

__all__ = ["Attention", "HeadNorms", "HeadShape", "PassPlan", "Scoring", "plan_pass", "spans_of"]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The work that the layers of one forward pass share; the first layer that asks computes it.

    rotations  the ways in which the pass's tokens are turned; a layer has the number of one
    """

    rotations: Sequence[Rotation]
    slot_mapping: Tensor
    spans: Spans
    deterministic: bool
    _stores: dict[tuple[HeadShape, int | None], Store] = field(default_factory=dict)
    _rows: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _attends: dict[tuple[HeadShape, int | None], Attend] = field(default_factory=dict)

    def store(self, shape: HeadShape, kv_cache: Tensor, table: int | None) -> Store:
        if (shape, table) not in self._stores:
            rotation = None if table is None else self.rotations[table]
            places = Places(rotation, self.slot_mapping)
            self._stores[shape, table] = plan_store(places, shape, kv_cache)
        return self._stores[shape, table]

    def key_rows(self, kv_cache: Tensor) -> Tensor:
        """Return where the pass's keys go in such a cache, as `kernels.store_kv` has it."""
        if kv_cache.shape not in self._rows:
            self._rows[kv_cache.shape] = key_rows(self.slot_mapping, kv_cache)
        return self._rows[kv_cache.shape]

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


def plan_pass(batch: Batch, tables: Sequence[RotaryTable], deterministic: bool) -> PassPlan:
    rotations = [table.rows(batch.positions, batch.max_context_len) for table in tables]
    return PassPlan(rotations, batch.slot_mapping, spans_of(batch), deterministic)


class Attention:
    """The attention of one layer; it also stores the keys and values in the cache.

    x [tokens, hidden] -> [tokens, heads * head_dim]

    qkv    gives queries, keys and values, (heads + 2 * kv_heads) * head_dim numbers a token
    table  the number of the rotations that turn queries and keys; None means none does
    """

    def __init__(
        self,
        qkv: Linear,
        shape: HeadShape,
        scoring: Scoring,
        norms: HeadNorms | None,
        table: int | None,
    ) -> None:
        self.qkv = qkv
        self.shape = shape
        self.scoring = scoring
        self.norms = norms
        self.table = table

    def __call__(self, x: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        query = plan.store(self.shape, kv_cache, self.table)(self.qkv(x), self.norms, kv_cache)
        attend = plan.attend(self.shape, kv_cache, self.scoring.window)
        return attend(query, kv_cache, self.scoring).view(len(x), -1)
