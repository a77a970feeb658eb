"""The model runner: it turns a plan into drawn tokens.

It is the only part of the engine that touches the model.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.worker.engine.batch import PersistentBatch
from penstock.worker.engine.grammar.constraints import Constraint
from penstock.worker.engine.sampler import NO_TOKEN, Sampled, Sampler, SamplerRow
from penstock.worker.engine.sequence import Plan, Sequence
from penstock.worker.layers.batch import Batch
from penstock.worker.models.served import Network


class ModelRunner:
    def __init__(
        self, model: Network, kv_caches: list[Tensor], batch: PersistentBatch, sampler: Sampler
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.batch = batch
        self.sampler = sampler
        self._drawing: list[Sequence] = []  # that drew last, and what the sampler needs of them
        self._rows: list[SamplerRow] = []
        self._constraints: list[Constraint | None] = []

    @torch.inference_mode()
    def run(self, plan: Plan) -> Sampled:
        """Compute the plan; draw a token for each slice that reaches its sequence's end."""
        batch = self.batch.build(plan)
        hidden = self.model(batch, self.kv_caches)
        total = hidden.sum()  # not finite if any of them is not
        sampled = self._sample(plan, batch, hidden)
        if math.isfinite(float(total)):
            return sampled
        return _without(sampled, plan, _spoilt(batch.query_start, hidden))

    def _sample(self, plan: Plan, batch: Batch, hidden: Tensor) -> Sampled:
        if not plan.drawing:
            return Sampled([], [])
        if not plan.is_decode:
            places = torch.from_numpy(np.flatnonzero(plan.draws)).to(hidden.device)
            hidden = hidden[batch.query_start[1:][places] - 1]
        if plan.drawing is not self._drawing:
            self._drawing = plan.drawing
            self._rows = [seq.sampling for seq in plan.drawing]
            self._constraints = [seq.constraint for seq in plan.drawing]
        masks = self.sampler.masks(self._constraints)  # while a GPU may still compute
        return self.sampler.sample(
            self.model.logits(hidden),
            self._rows,
            masks,
            plan.of_drawing(plan.starts + plan.counts),
        )

    def zero(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros, since they may hold NaN.

        Attention gives the unused slots of a later holder a weight of zero, and zero times NaN is
        NaN.
        """
        for kv_cache in self.kv_caches:
            kv_cache[blocks] = 0


def _without(sampled: Sampled, plan: Plan, spoilt: list[int]) -> Sampled:
    """Return the sample without the tokens of spoilt slices.

    Such a slice may draw a token all the same, when a sliding window hides its earlier NaN.
    """
    drawn = {place: row for row, place in enumerate(np.flatnonzero(plan.draws).tolist())}
    rows = {drawn.get(place) for place in spoilt}
    token_ids = [NO_TOKEN if row in rows else each for row, each in enumerate(sampled.token_ids)]
    return replace(sampled, token_ids=token_ids, spoilt=spoilt)


def _spoilt(query_start: Tensor, hidden: Tensor) -> list[int]:
    """Return the places of the slices with a row that is not finite."""
    rows = np.flatnonzero(~hidden.isfinite().all(-1).cpu().numpy())
    slices = np.searchsorted(query_start.cpu().numpy(), rows, side="right") - 1
    return [int(place) for place in np.unique(slices)]
