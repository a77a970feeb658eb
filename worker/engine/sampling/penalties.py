"""The repetition, frequency and presence penalties, from sparse token counts.

The counts grow with the sequence.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.numbers.transfers import send
from penstock.schemas.params.sampling import SamplingParams

_FLOAT = np.finfo(np.float32)


class SeenTokens:
    """The distinct tokens of a sequence, and how often each is in the completion.

    `token_ids` is the sequence's own list. `look` counts the tokens added since the last look.
    """

    def __init__(self, params: SamplingParams, token_ids: list[int], num_prompt: int) -> None:
        self.params = params
        self._token_ids = token_ids
        self._num_counted = num_prompt
        # Only the repetition penalty looks at the prompt.
        prompt = token_ids[:num_prompt] if params.repetition_penalty != 1 else []
        self._ids = np.unique(np.array(prompt, np.int64))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}

    def look(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct ids, and how often each is in the completion."""
        for token in self._token_ids[self._num_counted :]:
            place = self._place(token)
            self._counts[place] += 1
        self._num_counted = len(self._token_ids)
        size = len(self._places)
        return self._ids[:size], self._counts[:size]

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):  # doubles the arrays, so that a token costs the same on average
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[place] = token
        return place


def penalise(logits: Tensor, seen_tokens: list[tuple[int, SeenTokens]]) -> None:
    """Change in place the logits [rows, vocab] of the tokens that each of these rows has seen.

    The repetition penalty divides a positive logit and multiplies a negative one, for tokens of
    prompt and completion. The frequency penalty is subtracted for each time that the token is in
    the completion, the presence penalty once.
    """
    looks = [entry.look() for _, entry in seen_tokens]
    sizes = [len(ids) for ids, _ in looks]
    ids = np.concatenate([ids for ids, _ in looks])
    counts = np.concatenate([counts for _, counts in looks])
    rows = np.repeat([row for row, _ in seen_tokens], sizes)
    repetition = np.repeat([entry.params.repetition_penalty for _, entry in seen_tokens], sizes)
    repetition = repetition.clip(min=_FLOAT.tiny)  # 0 times minus infinity would be NaN
    frequency = np.repeat([entry.params.frequency_penalty for _, entry in seen_tokens], sizes)
    presence = np.repeat([entry.params.presence_penalty for _, entry in seen_tokens], sizes)
    loss = counts * frequency + (counts > 0) * presence

    columns = [rows, ids, repetition.astype(np.float32), loss.astype(np.float32)]
    rows_of, tokens, strength, losses = send(columns, logits.device)
    before = logits[rows_of, tokens]
    after = torch.where(before > 0, before / strength, before * strength)
    logits[rows_of, tokens] = after.clamp(max=float(_FLOAT.max)) - losses
