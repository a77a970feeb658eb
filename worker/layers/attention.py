"""The attention of one layer over the paged cache."""

from torch import Tensor

from penstock.kernels.attention.spans import NO_SCALES, HeadShape, KvScales, Scoring
from penstock.kernels.cache.rotate_and_store import HeadNorms
from penstock.worker.layers.forward_pass import PassPlan
from penstock.worker.layers.linear import Linear

__all__ = ["NO_SCALES", "Attention", "HeadNorms", "HeadShape", "KvScales", "Scoring"]


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
        store = plan.store(self.shape, kv_cache, self.table)
        query = store(self.qkv(x, plan), self.norms, kv_cache, self.scoring.scales)
        attend = plan.attend(self.shape, kv_cache, self.scoring.window)
        return attend(query, kv_cache, self.scoring).view(len(x), -1)
