"""The running sequences in columns: a step's host work is a few operations on all of them."""

import numpy as np
from numpy.typing import NDArray

from penstock.worker.engine.sequence import Sequence

_STOPS = 4  # ids that end a sequence; who has more is looked at by itself
_NO_STOP = -2  # no token, and not what is drawn instead of one
Numbers = NDArray[np.int64]


class Columns:
    """A row a running sequence, `seq.row`. What the sequence itself says is said here too.

    longest     tokens, prompt and completion, with which it ends
    stop_ids    [rows, 4]
    is_watched  what it draws is more than a number: a grammar's, one with log probabilities, or one
                that may be any of many stop ids
    stay        a number for each time that a sequence got a row
    """

    def __init__(self, max_num_seqs: int) -> None:
        (
            self.num_tokens,
            self.num_computed,
            self.num_blocks,
            self.last_token,
            self.longest,
            self.stay,
        ) = np.zeros((6, max_num_seqs), np.int64)
        self.stop_ids = np.full((max_num_seqs, _STOPS), _NO_STOP, np.int64)
        self.is_watched = np.zeros(max_num_seqs, np.bool_)
        self._num_stays = 0

    def enter(self, seq: Sequence) -> None:
        """It has its row, its blocks, and what of its tokens was found computed."""
        row, stops = seq.row, sorted(seq.stop_ids)
        self._num_stays += 1
        self.stay[row] = self._num_stays
        self.num_tokens[row], self.num_computed[row] = len(seq.token_ids), seq.num_found
        self.num_blocks[row], self.last_token[row] = len(seq.block_table), seq.token_ids[-1]
        self.longest[row] = seq.num_prompt + seq.max_tokens
        self.stop_ids[row] = [*stops[:_STOPS], *[_NO_STOP] * (_STOPS - len(stops))]
        self.is_watched[row] = (
            len(stops) > _STOPS or seq.constraint is not None or seq.params.logprobs is not None
        )

    def draw(self, rows: Numbers, token_ids: Numbers) -> NDArray[np.bool_]:
        """Each row gains a token. Returns who may end with it, or has more to it than the id."""
        lengths = self.num_tokens[rows] + 1
        self.num_tokens[rows], self.last_token[rows] = lengths, token_ids
        special: NDArray[np.bool_] = (self.stop_ids[rows] == token_ids[:, None]).any(1)
        special |= lengths >= self.longest[rows]
        special |= self.is_watched[rows]
        special |= token_ids < 0
        return special
