"""DRY ("don't repeat yourself"): what would repeat earlier tokens becomes less likely.

The rule is p-e-w's, as text-generation-webui and llama.cpp have it. Where the sequence ends as it
did at an earlier place, the token that came next there loses

    dry_multiplier * dry_base ** (length - dry_allowed_length)

with the length of the longest such end, where it is at least `dry_allowed_length`. No end reaches
over a sequence breaker, nor over more than MOST_MATCHED tokens.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.schemas.params.sampling import SamplingParams

MOST_MATCHED = 128
_MOST = float(np.finfo(np.float32).max)


class DryTokens:
    """The tokens of a sequence, to be looked through for earlier ends. `token_ids` grows."""

    def __init__(
        self, params: SamplingParams, token_ids: list[int], breakers: frozenset[int]
    ) -> None:
        self._params = params
        self._token_ids = token_ids
        self._breakers = breakers
        self._ids = np.array(token_ids, np.int64)
        self._count = len(token_ids)

    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the tokens that would repeat what came before, and what each of them loses."""
        params, lengths = self._params, self._lengths()
        excess = np.array(list(lengths.values()), np.float64) - params.dry_allowed_length
        with np.errstate(over="ignore"):
            losses = params.dry_multiplier * np.power(params.dry_base, excess)
        return np.array(list(lengths), np.int64), losses.clip(max=_MOST).astype(np.float32)

    def _lengths(self) -> dict[int, int]:
        """Return the tokens that came after an earlier end, with the length of the longest."""
        params, ids = self._params, self._looked_at()
        most = min(MOST_MATCHED, len(ids) - 1)
        lengths: dict[int, int] = {}
        ends = np.arange(len(ids) - 1)  # places of the last tokens of the earlier ends
        for length in range(1, most + 1):
            token = int(ids[-length])
            if token in self._breakers:
                break
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - length + 1] == token]
            if not len(ends):
                break
            if length >= params.dry_allowed_length:
                lengths.update(dict.fromkeys(ids[ends + 1].tolist(), length))
        return {token: length for token, length in lengths.items() if token not in self._breakers}

    def _looked_at(self) -> NDArray[np.int64]:
        count = len(self._token_ids)
        if count > len(self._ids):  # doubles the array, so that a token costs the same on average
            room = np.zeros(max(64, count), np.int64)
            self._ids = np.concatenate([self._ids, room])
        self._ids[self._count : count] = self._token_ids[self._count :]
        self._count = count
        last = self._params.dry_penalty_last_n
        return self._ids[0 if last < 0 else max(0, count - last) : count]
