"""Multi-head latent attention (DeepSeek-AI, 2024), over a cache of compressed keys and values.

A token's keys and values of all heads are products of one short vector, the latent, with weights
of each head. So a query is multiplied by its head's key weights instead, and meets the latents
themselves; and what it attends to is a mixture of latents, multiplied by the head's value weights
afterwards. The cache has a latent and a rotated key for each token, and nothing for each head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.rotary import rotary
from penstock.kernels.spans import HeadShape, Scoring
from penstock.kernels.store_kv import store_rows
from penstock.worker.layers.attention import PassPlan
from penstock.worker.layers.linear import Linear
from penstock.worker.layers.norm import Norm

_TILE_ROWS = 32  # of a deterministic product


class HeadLinear:
    """A product of each head with a weight of its own: x [tokens, heads, in] -> [.., out].

    weight  [heads, in, out]
    """

    def __init__(self, weight: Tensor, deterministic: bool) -> None:
        self.weight = weight
        self._deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1)
        if not self._deterministic:
            return torch.bmm(rows, self.weight).transpose(0, 1)
        padded = F.pad(rows, (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [torch.bmm(tile, self.weight) for tile in torch.split(padded, _TILE_ROWS, 1)]
        return torch.cat(tiles, 1)[:, : len(x)].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The products and norms of one layer.

    first   gives what queries are made of, then the latent, then the key that is turned
    query   makes queries of normalised numbers; None where `first` gives queries themselves
    key     of each head, from the part of a query that is not turned to the latent's size
    value   of each head, from the latent's size
    """

    first: Linear
    query_norm: Norm | None
    query: Linear | None
    latent_norm: Norm
    key: HeadLinear
    value: HeadLinear


class LatentAttention:
    """The attention of one layer: x [tokens, hidden] -> [tokens, heads * value_dim].

    shape   one key head, of a latent and the key that is turned; `latent` is the latent's size
    turned  the size of the key that is turned
    table   the number of the rotations
    """

    def __init__(
        self, weights: LatentWeights, shape: HeadShape, turned: int, scoring: Scoring, table: int
    ) -> None:
        self.weights = weights
        self.shape = shape
        self.scoring = scoring
        self._turned = turned
        self._table = table

    def __call__(self, x: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        weights, turned, latent_size = self.weights, self._turned, self.shape.value_dim
        first = weights.first(x)
        sizes = [first.shape[1] - latent_size - turned, latent_size, turned]
        query, latent, key = (part.contiguous() for part in torch.split(first, sizes, 1))
        if weights.query is not None and weights.query_norm is not None:
            query = weights.query(weights.query_norm(query))
        query = query.view(len(x), self.shape.num_heads, -1)
        still, turning = query.tensor_split((query.shape[2] - turned,), 2)
        rotation = plan.rotations[self._table]
        both = torch.cat((turning, key[:, None]), 1)
        both = rotary(both, rotation.cos, rotation.sin)
        latent = weights.latent_norm(latent)
        key = torch.cat((latent[:, None], both[:, -1:]), 2)
        store_rows(key, key, kv_cache, plan.key_rows(kv_cache))
        query = torch.cat((weights.key(still), both[:, :-1]), 2)
        attended = plan.attend(self.shape, kv_cache, None)(query, kv_cache, self.scoring)
        return weights.value(attended).reshape(len(x), -1)
