"""The model runner: it turns a plan into drawn tokens.

It is the only part of the engine that touches the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.numbers.transfers import send
from penstock.worker.engine.grammar.constraints import Constraint
from penstock.worker.engine.running.batch import PersistentBatch
from penstock.worker.engine.running.prompt_scores import PromptScores
from penstock.worker.engine.sampling.sampler import NO_TOKEN, DrawnTokens, Sampled, Sampler
from penstock.worker.engine.sampling.sampler_row import SamplerRow
from penstock.worker.engine.sampling.transfers import Arriving
from penstock.worker.engine.sequences.columns import Numbers
from penstock.worker.engine.sequences.sequence import Plan, Sequence
from penstock.worker.models.contract.served import Network


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A plan whose forward pass was launched; the device may still compute it.

    hidden  [drawing_seqs, hidden_size]  the state of each slice that draws
    sums    [tokens]                     the sum of each token's state: NaN if any part of it is
    places  the tokens of the pass that are still in the plan; None means all
    scores  the log probabilities of prompts that ask for them
    """

    plan: Plan
    hidden: Tensor
    sums: Arriving
    places: Numbers | None = None
    scores: PromptScores | None = None

    def only(self, places: Numbers) -> "Launched":
        """Return the launched step for some of its sequences, of which each has a single token."""
        (index,) = send([places], self.hidden.device)
        return Launched(self.plan.only(places), self.hidden[index], self.sums, places)

    def spoilt_places(self) -> list[int]:
        """Return the places of the slices with a token whose state is no number; wait for them."""
        sums = self.sums.wait().numpy()
        tokens = np.flatnonzero(~np.isfinite(sums if self.places is None else sums[self.places]))
        if not len(tokens):
            return []
        slices = np.searchsorted(self.plan.counts.cumsum(), tokens, side="right")
        places = {int(place) for place in slices}
        places |= {fork for fork, leader in self.plan.forks() if leader in places}
        return sorted(places)


class ModelRunner:
    def __init__(
        self,
        model: Network,
        kv_caches: list[Tensor],
        batch: PersistentBatch,
        sampler: Sampler,
        copy_state: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make one. `copy_state` copies a row's state to another, of models that have states."""
        self.model = model
        self.copy_state = copy_state
        self.kv_caches = kv_caches
        self._bytes = [kv_cache.view(torch.uint8) for kv_cache in kv_caches]
        self.batch = batch
        self.sampler = sampler
        self._seqs: list[Sequence] = []  # these drew last; what the sampler needs of them:
        self._rows: list[SamplerRow] = []
        self._constraints: list[Constraint | None] = []

    def run(self, plan: Plan) -> Sampled:
        """Compute the plan; draw a token for each slice that reaches its sequence's end."""
        return self.draw(self.launch(plan)).read()

    @torch.inference_mode()
    def launch(
        self, plan: Plan, after: DrawnTokens | None = None, places: Numbers | None = None
    ) -> Launched:
        """Launch the plan's forward pass.

        after   the draw of the tokens that the plan computes, where the host does not know them
        places  the places in that plan of this one's sequences; None means all
        """
        batch = self.batch.build(plan.computed)
        if after is not None:
            tokens = after.tokens.clamp(min=0)  # who drew none ends with it
            if places is not None:
                tokens = tokens[send([places], tokens.device)[0]]
            batch = replace(batch, token_ids=tokens)
        hidden = self.model(batch, self.kv_caches)
        sums = Arriving(hidden.sum(-1, dtype=torch.float32))
        forks = [(int(plan.rows[leader]), int(plan.rows[fork])) for fork, leader in plan.forks()]
        self.copy(plan.copies_after, forks)
        if plan.is_decode:
            return Launched(plan, hidden, sums)
        scores = None
        if any(seq.prompt_logprobs is not None for seq in plan.seqs):
            scores = PromptScores(plan, hidden, self.model.logits, self.sampler.vocab_size)
        ends = plan.counts.cumsum()[plan.draws] - 1
        return Launched(plan, hidden[send([ends], hidden.device)[0]], sums, scores=scores)

    def copy(self, blocks: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Make the second of each pair a copy of the first: blocks, and the states of rows."""
        if blocks and self._bytes:
            pairs = np.array(blocks, np.int64).T
            sources, targets = send([pairs], self._bytes[0].device)[0]
            for numbers in self._bytes:
                numbers[targets] = numbers[sources]
        if self.copy_state is not None:
            for source, target in rows:
                self.copy_state(source, target)

    @torch.inference_mode()
    def draw(self, step: Launched) -> DrawnTokens:
        """Draw the tokens that follow from the plan, one for each of its `drawing_seqs`."""
        plan = step.plan
        if not plan.drawing_seqs:
            draw = DrawnTokens(torch.empty(0, dtype=torch.int64), lambda: Sampled([], []))
        else:
            draw = self._draw(plan, step.hidden)

        def read() -> Sampled:
            sample, places = draw.read(), step.spoilt_places()
            if step.scores is not None:
                sample = replace(sample, prompt_logprobs=step.scores.read())
            return _without(sample, plan, places) if places else sample

        return DrawnTokens(draw.tokens, read)

    def _draw(self, plan: Plan, hidden: Tensor) -> DrawnTokens:
        if plan.drawing_seqs is not self._seqs:
            self._seqs = plan.drawing_seqs
            self._rows = [seq.sampling for seq in plan.drawing_seqs]
            self._constraints = [seq.constraint for seq in plan.drawing_seqs]
        masks = self.sampler.masks(self._constraints)  # while a GPU may still compute
        return self.sampler.draw(
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
        if not self._bytes:
            return
        (index,) = send([np.array(blocks, np.int64)], self._bytes[0].device)
        for numbers in self._bytes:
            numbers[index] = 0


def _without(sample: Sampled, plan: Plan, spoilt_places: list[int]) -> Sampled:
    """Return the sample without the tokens of spoilt slices.

    Such a slice may draw a token all the same, when a sliding window hides its earlier NaN.
    """
    row_of = {place: row for row, place in enumerate(np.flatnonzero(plan.draws).tolist())}
    rows = {row_of.get(place) for place in spoilt_places}
    token_ids = [NO_TOKEN if row in rows else token for row, token in enumerate(sample.token_ids)]
    return replace(sample, token_ids=token_ids, spoilt_places=spoilt_places)
