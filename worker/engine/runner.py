"""A plan in, the drawn tokens out: the only part of the engine that touches the model."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.engine.batch import PersistentBatch
from worker.engine.constraints import Constraint
from worker.engine.sampler import Sampled, Sampler, SamplerRow
from worker.engine.sequence import Plan, Sequence
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
        self._drawing: list[Sequence] = []  # who drew last, and what of them the sampler needs
        self._rows: list[SamplerRow] = []
        self._constraints: list[Constraint | None] = []

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        """Compute every slice; draw a token for each that reaches its sequence's end, in order."""
        batch = self.batch.build(plan)
        hidden = self.decoder(batch, self.kv_caches)
        if not plan.drawing:
            return Sampled([], [])
        if not plan.is_decode:
            places = torch.from_numpy(np.flatnonzero(plan.draws)).to(hidden.device)
            hidden = hidden[batch.query_start[1:][places] - 1]
        if plan.drawing is not self._drawing:
            self._drawing = plan.drawing
            self._rows = [seq.sampling for seq in plan.drawing]
            self._constraints = [seq.constraint for seq in plan.drawing]
        masks = self.sampler.masks(self._constraints)  # while a GPU still computes
        return self.sampler.sample(
            self.decoder.logits(hidden),
            self._rows,
            masks,
            plan.of_drawing(plan.starts + plan.counts),
        )

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite what is no number: a later holder's unused slots meet a weight of zero, and
        zero times NaN is NaN."""
        for kv_cache in self.kv_caches:
            kv_cache[blocks] = 0
