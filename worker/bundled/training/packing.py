"""Rows of whole documents for training, and which of their tokens count."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.worker.bundled.training.corpus.document import Document
from penstock.worker.bundled.training.rendering import render

Row = list[tuple[int, bool]]  # token id, whether guessing it counts

PENDING_DOCUMENTS = 64


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The tokens that are read, the places after which one is guessed, and the right guesses.

    token_ids  [rows, length]       int64
    places     [rows * length]      bool
    targets    [number of places]   int64
    """

    token_ids: Tensor
    places: Tensor
    targets: Tensor


class Packer:
    """A packer that fills rows with whole documents.

    It takes the oldest one that fits, and the longest one that fits where room is short. Documents
    may see their neighbours in the row; they learn not to look past their first token.
    """

    def __init__(self, source: Iterator[Document], tokenizer: Tokenizer, seed: int) -> None:
        self.source = source
        self.rng = Random(seed)
        self.tokenizer = tokenizer
        self.pending: list[Row] = []

    def batch(self, num_rows: int, length: int) -> TrainingBatch:
        rows = [self._row(length + 1) for _ in range(num_rows)]
        token_ids = torch.tensor([[token for token, _ in row] for row in rows])
        counts = torch.tensor([[in_loss for _, in_loss in row] for row in rows])
        places = counts[:, 1:].flatten()
        return TrainingBatch(token_ids[:, :-1], places, token_ids[:, 1:].flatten()[places])

    def _row(self, length: int) -> Row:
        row: Row = []
        while (document := self._fitting(length - len(row))) is not None:
            row += document
        return row + [(0, False)] * (length - len(row))

    def _fitting(self, room: int) -> Row | None:
        while len(self.pending) < PENDING_DOCUMENTS:
            self.pending.append(self._encode(next(self.source)))
        places = [place for place, row in enumerate(self.pending) if len(row) <= room]
        if not places:
            return None
        oldest = min(places) if room > 128 else max(places, key=lambda i: len(self.pending[i]))
        return self.pending.pop(oldest)

    def _encode(self, document: Document) -> Row:
        row: Row = []
        for piece in render(document):
            encoding = self.tokenizer.encode(piece.text, add_special_tokens=False)
            row += [(token, self.rng.random() < piece.share) for token in encoding.ids]
        return row
