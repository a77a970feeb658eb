"""Attention of one layer over the paged cache, and what all layers of a forward pass share."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from kernels.paged_attention import Attend, plan_attention
from kernels.rotate_and_store import HeadNorms, Places, Store, plan_store
from kernels.spans import HeadShape, Spans
from worker.layers.batch import Batch
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What one forward pass has planned, the same for every layer.

    attend  per window of the model's layers
    """

    store: Store
    attend: dict[int | None, Attend]


def plan_pass(
    batch: Batch,
    table: RotaryTable,
    shape: HeadShape,
    kv_cache: Tensor,
    windows: Iterable[int | None],
    deterministic: bool,
) -> PassPlan:
    """kv_cache: that of any layer; they all have one shape."""
    spans = Spans(
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        batch.max_query_len,
        batch.max_context_len,
    )
    places = Places(*table.rows(batch.positions), batch.slot_mapping)
    return PassPlan(
        plan_store(places, shape, kv_cache),
        {
            window: plan_attention(spans, shape, kv_cache, window, deterministic)
            for window in windows
        },
    )


class Attention:
    """qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> [tokens, heads * head_dim]. Stores KV."""

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
        return plan.attend[self.window](query, kv_cache, self.scale).view(qkv.shape[0], -1)
