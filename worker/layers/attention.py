"""Attention of one layer over the paged cache, and what all layers of a forward pass share."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_attention import Attend, plan_attention
from kernels.rotary import rotary
from kernels.spans import HeadShape, Spans
from kernels.store_kv import key_rows, store_rows
from worker.layers.batch import Batch
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Index tensors of one forward pass, the same in every layer.

    cos, sin  [tokens, head_dim]
    key_rows  [tokens * kv_heads]   where the new keys go
    attend    per window of the model's layers
    """

    cos: Tensor
    sin: Tensor
    key_rows: Tensor
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
    return PassPlan(
        *table.rows(batch.positions),
        key_rows(batch.slot_mapping, shape.num_kv_heads, kv_cache.shape[3]),
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
        self.query_norm = query_norm
        self.key_norm = key_norm

    def __call__(self, qkv: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self.shape.head_dim)
        turning, value = heads.tensor_split((num_heads + num_kv_heads,), 1)
        if self.query_norm and self.key_norm:
            query, key = turning.tensor_split((num_heads,), 1)
            turning = torch.cat((self.query_norm(query), self.key_norm(key)), 1)
        query, key = rotary(turning, plan.cos, plan.sin).tensor_split((num_heads,), 1)
        store_rows(key, value, kv_cache, plan.key_rows)
        return plan.attend[self.window](query, kv_cache, self.scale).view(qkv.shape[0], -1)
