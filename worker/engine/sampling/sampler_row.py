"""One sequence as the sampler sees it: what its parameters ask for, what its ids say."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.sample import WAY
from penstock.schemas.params.sampling import MAX_STOP_BYTES, SamplingParams
from penstock.worker.engine.io.messages import NO_WORDS, WordIds
from penstock.worker.engine.sampling.cuts import asks_for_cuts
from penstock.worker.engine.sampling.dry import DryTokens
from penstock.worker.engine.sampling.penalties import SeenTokens

GREEDY_BELOW = 1e-5  # below it one token has all the probability; vLLM has the same limit
MOST_KEPT = 2**31 - 1
_LONGEST_WORD = MAX_STOP_BYTES + 1  # in tokens, of which a byte is the least


@dataclass(slots=True, eq=False)
class SamplerRow:
    """The sampler's view of one sequence, for as long as the sequence lives.

    `token_ids` is the sequence's own list, prompt and then completion, and grows with it. All
    other state follows from it, so a sequence rebuilt from its ids gets the same tokens.

    num_candidates  how many of the likeliest tokens a beam is told, of which its search draws
    """

    params: SamplingParams
    seed: int
    choice: int
    token_ids: list[int]
    num_prompt: int
    words: WordIds = NO_WORDS
    num_candidates: int = 0
    seen_tokens: SeenTokens | None = field(init=False, default=None)
    dry: DryTokens | None = field(init=False, default=None)
    is_cut: bool = field(init=False)  # by a rule that the kernels lack
    allowed_ids: Tensor | None = field(init=False, default=None)
    way: bytes = field(init=False)  # one record of type WAY
    is_plain: bool = field(init=False)  # needs only a draw, perhaps under a grammar

    def __post_init__(self) -> None:
        params = self.params
        weighs = params.presence_penalty or params.frequency_penalty
        if weighs or params.repetition_penalty != 1:
            self.seen_tokens = SeenTokens(params, self.token_ids, self.num_prompt)
        if params.dry_multiplier:
            self.dry = DryTokens(params, self.token_ids, self.words.dry_breakers)
        self.is_cut = asks_for_cuts(params) and not _is_greedy(params)
        self.way = _way(params, self.seed, self.choice, self.is_cut)
        if params.allowed_token_ids is not None:
            self.allowed_ids = torch.tensor(params.allowed_token_ids)
        alters = params.logit_bias or params.min_tokens or self.allowed_ids is not None
        looks_back = self.seen_tokens or self.dry or self.words.bad_words
        self.is_plain = not (alters or looks_back or self.is_cut or self.tells)

    def forbidden(self) -> list[int]:
        """Return the tokens that would end a bad word, of those that the completion began."""
        tail = self.token_ids[max(self.num_prompt, len(self.token_ids) - _LONGEST_WORD) :]
        return [
            ids[-1]
            for ids in self.words.bad_words
            if len(ids) <= len(tail) + 1 and tail[len(tail) + 1 - len(ids) :] == ids[:-1]
        ]

    @property
    def tells(self) -> Literal["likeliest", "named", "candidates"] | None:
        """Return the kind of tokens whose log probabilities are asked for; None where none are."""
        if self.num_candidates:
            return "candidates"
        if self.params.logprobs is None:
            return None
        return "likeliest" if self.params.logprob_token_ids is None else "named"

    @property
    def is_masked(self) -> bool:
        return self.params.structured_outputs is not None

    @property
    def position(self) -> int:
        """Return the next token's position in the completion."""
        return len(self.token_ids) - self.num_prompt


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def _way(params: SamplingParams, seed: int, choice: int, is_cut: bool) -> bytes:
    """Return how the row draws. From one that is cut nothing more is to be excluded."""
    way = np.zeros((), WAY)
    way["temperature"] = 0 if _is_greedy(params) else params.temperature
    way["top_p"] = 1
    if not is_cut:
        way["top_k"] = min(max(params.top_k, 0), MOST_KEPT)
        way["top_p"], way["min_p"] = params.top_p, params.min_p
    way["seed"], way["choice"] = seed & 0xFFFFFFFFFFFFFFFF, choice
    way["is_masked"] = params.structured_outputs is not None
    return way.tobytes()
