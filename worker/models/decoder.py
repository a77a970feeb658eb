"""The decoder that computes the models of all families."""

import torch
from torch import Tensor

from penstock.worker.layers.attention import plan_pass
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.decoder_layers import DecoderLayers
from penstock.worker.layers.embedding import Embedding, Head
from penstock.worker.layers.norm import RMSNorm
from penstock.worker.layers.rotary import RotaryTable
from penstock.worker.models.config import ModelConfig


class Decoder:
    """A `penstock.worker.models.served.Model` of our own layers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Embedding,
        layers: DecoderLayers,
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
        plan = plan_pass(batch, self.table, self.deterministic)
        hidden = self.layers(self.embedding(batch.token_ids), kv_caches, plan)
        return self.norm(hidden)

    def prepare(self, max_model_len: int) -> None:
        self.table.cover(max_model_len)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
