"""The decoder that computes the models of all families."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.layers.batch import Batch
from penstock.worker.layers.decoder_layers import DecoderLayers
from penstock.worker.layers.embedding import Embedding, Head
from penstock.worker.layers.forward_pass import plan_pass
from penstock.worker.layers.norm import Norm
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.rotary import RotaryTable
from penstock.worker.models.families.rope import Rope
from penstock.worker.models.native.config import ModelConfig


class Decoder:
    """A `penstock.worker.models.contract.served.Model` of our own layers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Embedding,
        layers: DecoderLayers,
        norm: Norm,
        head: Head,
        ropes: Sequence[Rope],
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        self.numerics = ""
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.arithmetic = arithmetic
        self._ropes = ropes
        self._device = device
        # Of an embedding that is rounded, so that it is what a checkpoint was trained with.
        self._factor = float(torch.tensor(config.decoder.embedding_factor, dtype=dtype))
        self.tables = [self._table(rope, rope.frequencies) for rope in ropes]

    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        plan = plan_pass(batch, self.tables, self.arithmetic)
        hidden = self.embedding(batch.token_ids)
        if self._factor != 1.0:
            hidden = hidden.mul_(self._factor)
        return self.norm(self.layers(hidden, kv_caches, plan))

    def prepare(self, max_model_len: int) -> None:
        """Fix the positions, as vLLM does: those of longer sequences where there may be such."""
        for place, rope in enumerate(self._ropes):
            if rope.longer and max_model_len > rope.longer[1]:
                self.tables[place] = self._table(rope, rope.longer[0])
            self.tables[place].cover(max_model_len)

    @property
    def states(self) -> None:
        return None

    @property
    def is_capturable(self) -> bool:
        reads_on_the_host = self.arithmetic.attention == "torch"
        return self.layers.are_capturable and not reads_on_the_host

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, Pass(self.arithmetic.deterministic))

    def _table(self, rope: Rope, frequencies: Sequence[float]) -> RotaryTable:
        turns = torch.tensor(frequencies, device=self._device)
        return RotaryTable(turns, rope.attention_factor, self.dtype)
