"""Multi-head latent attention (MLA; DeepSeek-AI, 2024), over a cache of compressed keys and values.

A token's keys and values of all heads are products of one short vector, the latent, with weights
of each head. So a query is multiplied by its head's key weights instead, and meets the latents
themselves; and what it attends to is a mixture of latents, multiplied by the head's value weights
afterwards. The cache has a latent and a rotated key for each token, and nothing for each head.

Latents are longer than keys. So for a long slice of a prompt the keys and values of its heads are
made after all, some heads at a time, and attended to as those of other models are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.backends import Backend
from penstock.kernels.attention.paged_attention import plan_attention
from penstock.kernels.attention.spans import HeadShape, Scoring, Spans
from penstock.kernels.cache.rotate_and_store import Places, plan_store
from penstock.kernels.numbers.eight_bits import flat_rows, widened
from penstock.worker.layers.forward_pass import PassPlan
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.norm import Norm
from penstock.worker.layers.products.product import Pass

_TILE_ROWS = 32  # rows of a deterministic product
_LONG = 256  # rows of a slice whose keys and values are worth making
_MADE_BYTES = 2**27  # keys and values made at a time


class HeadLinear:
    """A product of each head with a weight of its own: x [tokens, heads, in] -> [.., out].

    weight  [heads, in, out]
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, pass_: Pass) -> Tensor:
        rows = x.transpose(0, 1)
        if not pass_.deterministic:
            return torch.bmm(rows, self.weight).transpose(0, 1)
        full_rows = F.pad(rows, (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [torch.bmm(tile, self.weight) for tile in torch.split(full_rows, _TILE_ROWS, 1)]
        return torch.cat(tiles, 1)[:, : len(x)].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The products and norms of one layer.

    first   gives what queries are made of, then the latent, then the key that is turned
    query   makes queries of normalised numbers; None where `first` gives queries themselves
    key     each head's: from the part of a query that is not rotated to the latent's size
    value   each head's: from the latent's size
    """

    first: Linear
    query_norm: Norm | None
    query: Linear | None
    latent_norm: Norm
    key: HeadLinear
    value: HeadLinear


class LatentAttention:
    """The attention of one layer: x [tokens, hidden] -> [tokens, heads * value_dim].

    shape     one key head, of a latent and the key that is turned; `latent` is the latent's size
    rope_dim  the size of the key that is turned
    table     the number of the rotations
    """

    def __init__(
        self, weights: LatentWeights, shape: HeadShape, rope_dim: int, scoring: Scoring, table: int
    ) -> None:
        self.weights = weights
        self.shape = shape
        self.scoring = scoring
        self._rope_dim = rope_dim
        self._table = table

    def __call__(self, x: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        weights, rope_dim, latent_size = self.weights, self._rope_dim, self.shape.value_dim
        first = weights.first(x, plan)
        query, latents = first.tensor_split((first.shape[1] - latent_size - rope_dim,), 1)
        if weights.query is not None and weights.query_norm is not None:
            query = weights.query(weights.query_norm(query.contiguous()), plan)
        query = query.view(len(x), self.shape.num_heads, -1)
        still, rope_part = query.tensor_split((query.shape[2] - rope_dim,), 2)
        store = plan.latent_store(self._table, kv_cache)
        rope_part = store(rope_part, latents, weights.latent_norm.weights, kv_cache)
        if plan.deterministic or plan.spans.max_query_len < _LONG:
            return self._absorbed(still, rope_part, kv_cache, plan).view(len(x), -1)
        division = plan.divided(_LONG)
        out = x.new_empty(len(x), self.shape.num_heads, weights.value.weight.shape[2])
        if division.short is not None:
            parts = still[division.rows], rope_part[division.rows]
            out[division.rows] = self._absorbed(*parts, kv_cache, division.short)
        for span in division.long:
            rows = slice(span.start, span.stop)
            query = torch.cat((still[rows], rope_part[rows]), 2)
            table = plan.spans.block_tables[span.seq]
            out[rows] = self._made(query, kv_cache, table, span.context, plan.backend)
        return out.view(len(x), -1)

    def _absorbed(
        self, still: Tensor, rope_part: Tensor, kv_cache: Tensor, plan: PassPlan
    ) -> Tensor:
        """Attend to latents: both parts of queries -> [rows, heads, value_dim], contiguous."""
        query = torch.cat((self.weights.key(still, plan), rope_part), 2)
        latents = plan.attend(self.shape, kv_cache, None)(query, kv_cache, self.scoring)
        return self.weights.value(latents, plan).contiguous()

    def _made(
        self, query: Tensor, kv_cache: Tensor, table: Tensor, context: int, backend: Backend
    ) -> Tensor:
        """Attend to keys and values that are made of one sequence's latents.

        query  [rows, heads, of a head] -> [rows, heads, value_dim]; the last rows of the context
        """
        key, value = self.weights.key.weight, self.weights.value.weight
        rank, (heads, still, _), of_value = self.shape.value_dim, key.shape, value.shape[2]
        block_size, kept_width = kv_cache.shape[3:]
        width = -(-max(query.shape[2], of_value) // 32) * 32
        num_blocks = -(-context // block_size)
        rows = flat_rows(kv_cache, block_size * kept_width)[table[:num_blocks].long()]
        rows = rows.view(-1, kept_width)[:context]
        entries = widened(rows, kv_cache.dtype, query.dtype)
        latent, rope_key = entries.tensor_split((rank,), 1)
        of_head = 2 * num_blocks * block_size * width * query.element_size()
        together = max(1, min(heads, _MADE_BYTES // of_head))
        spans, slots = _alone(len(query), context, num_blocks, query.device)
        out = query.new_empty(len(query), heads, of_value)
        for first in range(0, heads, together):
            part = slice(first, min(first + together, heads))
            num = part.stop - first
            kv = query.new_zeros(context, 2 * num, width)
            kv[:, :num, :still] = torch.matmul(latent, key[part].transpose(1, 2)).transpose(0, 1)
            kv[:, :num, still : query.shape[2]] = rope_key[:, None]
            kv[:, num:, :of_value] = torch.matmul(latent, value[part]).transpose(0, 1)
            blocks = query.new_zeros(num_blocks, num, 2, block_size, width)
            # As of a pass that has the keys and values of all tokens, and no queries.
            store = plan_store(Places(None, slots), HeadShape(0, num, width), blocks, backend)
            store(kv.view(context, -1), None, blocks)
            rows = F.pad(query[:, part], (0, width - query.shape[2]))
            shape = HeadShape(num, num, width)
            attend = plan_attention(spans, shape, blocks, None, False, backend)
            out[:, part] = attend(rows, blocks, self.scoring)[..., :of_value]
        return out


def _alone(rows: int, context: int, num_blocks: int, device: torch.device) -> tuple[Spans, Tensor]:
    """Return the spans of one sequence, whose blocks lie in order, and the slots of its tokens."""

    def numbers(*of: int) -> Tensor:
        return torch.tensor(of, dtype=torch.int32, device=device)

    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    spans = Spans(numbers(0, rows), numbers(context), table, rows, context)
    return spans, torch.arange(context, device=device)
