"""The attention of one layer over the paged cache, and the plan that all layers share."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from penstock.kernels.paged_attention import Attend, plan_attention
from penstock.kernels.rotate_and_store import HeadNorms, Places, Store, plan_store
from penstock.kernels.spans import HeadShape, Spans
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.norm import RMSNorm
from penstock.worker.layers.rotary import RotaryTable


@dataclass(frozen=True)
class PassPlan:
    """The work that the layers of one forward pass share; the first layer that asks computes it.

    kv_cache  the cache of any layer; all layers' caches have one shape
    """

    places: Places
    spans: Spans
    shape: HeadShape
    kv_cache: Tensor
    deterministic: bool

    @cached_property
    def store(self) -> Store:
        return plan_store(self.places, self.shape, self.kv_cache)

    @cached_property
    def _attends(self) -> dict[int | None, Attend]:
        return {}

    def attend(self, window: int | None) -> Attend:
        if window not in self._attends:
            self._attends[window] = plan_attention(
                self.spans, self.shape, self.kv_cache, window, self.deterministic
            )
        return self._attends[window]


def plan_pass(
    batch: Batch, table: RotaryTable, shape: HeadShape, kv_cache: Tensor, deterministic: bool
) -> PassPlan:
    spans = Spans(
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        batch.max_query_len,
        batch.max_context_len,
    )
    places = Places(*table.rows(batch.positions, batch.max_context_len), batch.slot_mapping)
    return PassPlan(places, spans, shape, kv_cache, deterministic)


class Attention:
    """The attention of one layer; it also stores the keys and values in the cache.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> [tokens, heads * head_dim]
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        query_norm: RMSNorm | None,
        key_norm: RMSNorm | None,
    ) -> None:
        self.shape = HeadShape(num_heads, num_kv_heads, head_dim)
        self.window = window
        self.scale = head_dim**-0.5
        self.norms = None
        if query_norm and key_norm:
            self.norms = HeadNorms(query_norm.weight, key_norm.weight, key_norm.eps)

    def __call__(self, qkv: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        query = plan.store(qkv, self.norms, kv_cache)
        return plan.attend(self.window)(query, kv_cache, self.scale).view(qkv.shape[0], -1)
