"""The state of the running sequences in columns.

A step's work on the host is thus a few array operations on all sequences at once.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.worker.engine.sequences.sequence import Sequence

_STOPS = 4  # stop ids kept here; a sequence with more is watched
_NO_STOP = -2  # neither a token id nor NO_TOKEN
_NO_BORDER = 1 << 62
Numbers = NDArray[np.int64]


class Columns:
    """The columns, with one row for each running sequence at `seq.row`; they copy its numbers.

    longest     the number of tokens, prompt and completion, at which the sequence ends
    stop_ids    [rows, 4]
    is_watched  whether each drawn token needs more work: the sequence has a grammar, asks for log
                probabilities or an end to repetitions, is a beam, or has more stop ids than fit
    is_beam     whether it is a beam: how it goes on is known only after a step
    stay        a new number for each time that a sequence gets a row
    border      the number of computed tokens at which a step ends, so that the state is kept
    """

    def __init__(self, max_num_seqs: int) -> None:
        (
            self.num_tokens,
            self.num_computed,
            self.num_blocks,
            self.last_token,
            self.longest,
            self.stay,
            self.border,
        ) = np.zeros((7, max_num_seqs), np.int64)
        self.stop_ids = np.full((max_num_seqs, _STOPS), _NO_STOP, np.int64)
        self.is_watched, self.is_beam = np.zeros((2, max_num_seqs), np.bool_)
        self._num_stays = 0

    def enter(self, seq: Sequence) -> None:
        """Fill the row of a sequence that was just admitted; it has its row and blocks already."""
        row, stops = seq.row, sorted(seq.stop_ids)
        self._num_stays += 1
        self.stay[row] = self._num_stays
        self.num_tokens[row], self.num_computed[row] = len(seq.token_ids), seq.num_prefix
        self.num_blocks[row], self.last_token[row] = len(seq.block_table), seq.token_ids[-1]
        self.longest[row] = seq.num_prompt + seq.max_tokens
        self.note_border(seq)
        self.stop_ids[row] = [*stops[:_STOPS], *[_NO_STOP] * (_STOPS - len(stops))]
        self.is_beam[row] = seq.is_beam
        self.is_watched[row] = (
            len(stops) > _STOPS
            or seq.is_beam
            or seq.constraint is not None
            or seq.params.logprobs is not None
            or seq.prompt_logprobs is not None
            or seq.params.repetition_detection is not None
        )

    def grow(self, seq: Sequence) -> None:
        """Note the last token of a beam, which is not always the one that was drawn for it."""
        self.last_token[seq.row] = seq.token_ids[-1]

    def note_border(self, seq: Sequence) -> None:
        """Note the sequence's next border."""
        self.border[seq.row] = seq.borders[0] if seq.borders else _NO_BORDER

    def draw(self, rows: Numbers, token_ids: Numbers) -> NDArray[np.bool_]:
        """Add a drawn token to each row; return which rows need a closer look.

        Those are the rows that may end with the token, that are watched, or that drew none.
        """
        lengths = self.num_tokens[rows] + 1
        self.num_tokens[rows], self.last_token[rows] = lengths, token_ids
        special: NDArray[np.bool_] = (self.stop_ids[rows] == token_ids[:, None]).any(1)
        special |= lengths >= self.longest[rows]
        special |= self.is_watched[rows]
        special |= token_ids < 0
        return special
