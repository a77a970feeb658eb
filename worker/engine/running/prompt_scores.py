"""The log probabilities of prompts (prompt_logprobs), made in the steps that compute them."""

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from penstock.kernels.numbers.transfers import send
from penstock.worker.engine.io.messages import Logprob
from penstock.worker.engine.sampling.logprobs import PackedLogprobs, read_logprob
from penstock.worker.engine.sampling.transfers import Arriving
from penstock.worker.engine.sequences.sequence import Plan

_LOGITS = 2**24  # how many are there at once


class PromptScores:
    """The log probabilities of the prompt tokens that follow those of one step.

    Only sequences that ask for them have some. Logits are computed for a few tokens at a time, and
    only a row of `PackedLogprobs` is kept of each token's.
    """

    def __init__(
        self, plan: Plan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int
    ) -> None:
        """Launch the computation from hidden [tokens, hidden_size], the pass's states."""
        self._slices: list[tuple[int, list[int], int, list[Arriving], int]] = []
        size = max(1, _LOGITS // vocab_size)
        ends = plan.counts.cumsum().tolist()
        for place, at in enumerate(plan):
            if at.seq.prompt_logprobs is None:
                continue
            after = at.start + 1
            targets = at.seq.token_ids[after : min(after + at.count, at.seq.num_prompt)]
            num_logprobs, pieces, num_top = at.seq.params.prompt_logprobs or 0, [], 0
            for begin in range(0, len(targets), size):
                (ids,) = send([np.array(targets[begin : begin + size], np.int64)], hidden.device)
                first = ends[place] - at.count + begin
                logits = logits_of(hidden[first : first + len(ids)])
                pack = PackedLogprobs.of(logits, ids, num_logprobs > 0)
                pieces.append(Arriving(pack.rows))
                num_top = pack.num_top
            self._slices.append((place, targets, num_logprobs, pieces, num_top))

    def read(self) -> dict[int, list[Logprob]]:
        """Return them by the slice's place in the plan, and wait for them.

        They end before the first token whose logits are no numbers.
        """
        return {
            place: list(_until_none(targets, num_logprobs, pieces, num_top))
            for place, targets, num_logprobs, pieces, num_top in self._slices
        }


def _until_none(
    targets: list[int], num_logprobs: int, pieces: list[Arriving], num_top: int
) -> Iterator[Logprob]:
    rows = (row for piece in pieces for row in piece.wait().tolist())
    for token_id, row in zip(targets, rows, strict=True):
        logprob = read_logprob(row, token_id, num_top, num_logprobs)
        if logprob is None:
            return
        yield logprob
