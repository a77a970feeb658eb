"""The host's copy of what runs, kept from step to step, and the tensors cut from it."""

import numpy as np
import torch
from numpy.typing import NDArray

from worker.engine.sequence import Sequence, Slice
from worker.layers.batch import Batch


class PersistentBatch:
    """One row a running sequence: its tokens and its block table, appended to and never rebuilt.

    Rows are as wide as the longest sequence may be; the pages behind them are touched only as far
    as tokens were written.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        width = -(-max_model_len // block_size)
        self._tokens = np.zeros((max_num_seqs, width * block_size), np.int32)
        self._tables = np.zeros((max_num_seqs, width), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._stays: list[list[int] | None] = [None] * max_num_seqs

    def build(self, plan: list[Slice]) -> Batch:
        """The tensors of one step; the slices come end to end, in the plan's order."""
        seqs = [piece.seq for piece in plan]
        rows = np.array([seq.row for seq in seqs], np.int64)
        counts = np.array([piece.count for piece in plan], np.int64)
        starts = np.array([seq.num_computed for seq in seqs], np.int64)
        self._catch_up(seqs, rows)
        query_start = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        contexts = starts + counts
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        row_of = np.repeat(rows, counts)
        blocks = self._tables[row_of, positions // self.block_size].astype(np.int64)
        width = -(-int(contexts.max()) // self.block_size)
        return Batch(
            token_ids=self._send(self._tokens[row_of, positions].astype(np.int64)),
            positions=self._send(positions),
            slot_mapping=self._send(blocks * self.block_size + positions % self.block_size),
            query_start=self._send(query_start),
            context_lens=self._send(contexts.astype(np.int32)),
            block_tables=self._send(self._tables[rows, :width]),
            max_query_len=int(counts.max()),
            max_context_len=int(contexts.max()),
        )

    def _catch_up(self, seqs: list[Sequence], rows: NDArray[np.int64]) -> None:
        """Write what each gained since its last step: as a rule one token, and no block."""
        num_tokens = np.array([len(seq.token_ids) for seq in seqs], np.int64)
        num_blocks = np.array([len(seq.block_table) for seq in seqs], np.int64)
        gained_more = (num_tokens > self._num_tokens[rows] + 1) | (
            num_blocks != self._num_blocks[rows]
        )
        self._tokens[rows, num_tokens - 1] = [seq.token_ids[-1] for seq in seqs]
        for seq, more in zip(seqs, gained_more.tolist(), strict=True):
            if more or self._stays[seq.row] is not seq.block_table:
                self._write(seq)
        self._num_tokens[rows], self._num_blocks[rows] = num_tokens, num_blocks

    def _write(self, seq: Sequence) -> None:
        """What the sequence gained, or all of it on a new stay."""
        row = seq.row
        if self._stays[row] is not seq.block_table:
            self._stays[row], self._num_tokens[row], self._num_blocks[row] = seq.block_table, 0, 0
        written, known = int(self._num_tokens[row]), len(seq.token_ids)
        self._tokens[row, written:known] = seq.token_ids[written:]
        written, known = int(self._num_blocks[row]), len(seq.block_table)
        self._tables[row, written:known] = seq.block_table[written:]

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
