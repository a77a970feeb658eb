"""The one decoder: Llama's layers, with what other families add given as data."""

import torch
from torch import Tensor

from worker.layers.attention import Attention, PassPlan, plan_pass
from worker.layers.batch import Batch
from worker.layers.embedding import Embedding, Head
from worker.layers.linear import Linear
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryTable
from worker.models.config import ModelConfig


class DecoderLayer:
    """Attention, then the feed-forward layer, each added to the residual."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        qkv: Linear,
        attention: Attention,
        output: Linear,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
    ) -> None:
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.attention = attention
        self.output = output
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, hidden: Tensor, kv_cache: Tensor, plan: PassPlan) -> Tensor:
        """hidden [tokens, hidden_size], overwritten -> the same after the layer."""
        attended = self.attention(self.qkv(self.attention_norm(hidden)), kv_cache, plan)
        hidden = self.output.add(attended, hidden)
        return self.mlp.add(self.mlp_norm(hidden), hidden)


class Decoder:
    """Token ids in, a hidden state for each out. Call under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Head,
        table: RotaryTable,
        deterministic: bool,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.table = table
        self.deterministic = deterministic

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """-> [tokens, hidden_size]. kv_caches, one a layer, in `dtype`, gain the batch's KV."""
        shape = self.layers[0].attention.shape
        plan = plan_pass(
            batch, self.table, shape, kv_caches[0], set(self.config.windows), self.deterministic
        )
        hidden = self.embedding(batch.token_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, plan)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]"""
        return self.head(hidden)
