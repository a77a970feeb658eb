"""A plan in, the drawn tokens out: the only part of the engine that touches the model."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.engine.batch import PersistentBatch
from worker.engine.sampler import Sampled, Sampler
from worker.engine.sequence import Slice
from worker.layers.batch import Batch


class Model(Protocol):
    def __call__(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        """-> hidden states [tokens, hidden_size]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]"""


class ModelRunner:
    def __init__(
        self, decoder: Model, kv_caches: list[Tensor], batch: PersistentBatch, sampler: Sampler
    ) -> None:
        self.decoder = decoder
        self.kv_caches = kv_caches
        self.batch = batch
        self.sampler = sampler

    @torch.inference_mode()
    def run(self, plan: list[Slice]) -> Sampled:
        """Compute every slice; draw a token for each that reaches its sequence's end, in order."""
        batch = self.batch.build(plan)
        hidden = self.decoder(batch, self.kv_caches)
        draws = [piece.draws for piece in plan]
        if not any(draws):
            return Sampled([], [])
        places = torch.from_numpy(np.flatnonzero(draws)).to(batch.query_start.device)
        last_rows = batch.query_start[1:][places] - 1
        seqs = [piece.seq for piece in plan if piece.draws]
        masks = self.sampler.masks([seq.constraint for seq in seqs])  # while a GPU still computes
        return self.sampler.sample(
            self.decoder.logits(hidden[last_rows]), [seq.sampling for seq in seqs], masks
        )

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite what is no number: a later holder's unused slots meet a weight of zero, and
        zero times NaN is NaN."""
        for kv_cache in self.kv_caches:
            kv_cache[blocks] = 0
