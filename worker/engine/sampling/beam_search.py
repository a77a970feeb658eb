"""Beam search: the likeliest completions of one prompt, among those that a few beams lead to.

The algorithm is that of transformers: `GenerationMixin._beam_search`, with its rules for when a
search ends.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.io.messages import Logprob
from penstock.worker.engine.sampling.logprobs import LEAST_LOGPROB


def num_candidates(params: SamplingParams, stop_ids: frozenset[int]) -> int:
    """Return how many of a beam's likeliest next tokens its search looks at; 0: there is none.

    Were all stops among them, the others would still be as many as there may be beams.
    """
    return params.num_drawn + len(stop_ids) if params.use_beam_search else 0


class Hypothesis(NamedTuple):
    """A completion that has ended, and its score, of which the largest is the best."""

    score: float
    token_ids: list[int]
    logprobs: list[Logprob]


@dataclass(slots=True)
class Beam:
    """A completion that goes on.

    parent  the place of the beam, in the step before, that it continues by its last token
    total   the log probability of its tokens
    """

    parent: int = 0
    total: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class BeamSearch:
    """The search of one prompt's answers.

    beams    those that go on: at the beginning one without a token, at the end none
    answers  the best that have ended, the best first; in the end as many as there are beams, if
             the rules leave so many
    """

    def __init__(self, params: SamplingParams, max_tokens: int, stop_ids: frozenset[int]) -> None:
        self.beams = [Beam()]
        self.answers: list[Hypothesis] = []
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._width = params.num_drawn
        self._length = 0

    def advance(self, rows: list[Logprob]) -> None:
        """Take the likeliest next tokens of each beam, in the order of `beams`."""
        self._length += 1
        likeliest = sorted(
            (
                (beam.total + logprob, -place, -token_id, logprob)
                for place, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
                for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
                if logprob > LEAST_LOGPROB
            ),
            reverse=True,
        )
        is_last = self._length == self._max_tokens
        going_on: list[Beam] = []
        for rank, (total, place, token_id, logprob) in enumerate(likeliest):
            ends = is_last or -token_id in self._stop_ids
            if not ends and len(going_on) < self._width:
                going_on.append(self._continued(rows, -place, -token_id, logprob, total))
            elif ends and rank < self._width:
                beam = self._continued(rows, -place, -token_id, logprob, total)
                score = total / math.pow(self._length, self._params.length_penalty)
                self.answers.append(Hypothesis(score, beam.token_ids, beam.logprobs))
        self.answers.sort(key=lambda answer: answer.score, reverse=True)
        del self.answers[self._width :]
        self.beams = going_on if self._goes_on(going_on) else []

    def _goes_on(self, beams: list[Beam]) -> bool:
        """Return whether an answer that is still to come may be better than the worst one had."""
        if not beams or len(self.answers) < self._width:
            return bool(beams)
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True:
            return False
        length = self._max_tokens if early == "never" and penalty > 0 else self._length
        return beams[0].total / math.pow(length, penalty) > self.answers[-1].score

    def _continued(
        self, rows: list[Logprob], place: int, token_id: int, logprob: float, total: float
    ) -> Beam:
        beam, row, num_logprobs = self.beams[place], rows[place], self._params.logprobs
        logprobs = []
        if num_logprobs is not None:
            tops = row.top_ids[:num_logprobs], row.top_logprobs[:num_logprobs]
            logprobs = [*beam.logprobs, Logprob(token_id, logprob, *tops)]
        return Beam(place, total, [*beam.token_ids, token_id], logprobs)
