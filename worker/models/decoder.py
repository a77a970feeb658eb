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
    """The model: token ids in, a hidden state for each out. Call under `torch.inference_mode`."""

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
        """Return the hidden states [tokens, hidden_size] of the batch.

        kv_caches, one for each layer and in `dtype`, gain the batch's KV.
        """
        plan = plan_pass(batch, self.table, self.deterministic)
        hidden = self.layers(self.embedding(batch.token_ids), kv_caches, plan)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [rows, vocab_size], of hidden [rows, hidden_size]."""
        return self.head(hidden)
