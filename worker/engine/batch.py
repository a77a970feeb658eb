"""The host's copy of what runs, kept from step to step, and the tensors cut from it."""

import numpy as np
import torch

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
        self._num_tokens = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._stays: list[list[int] | None] = [None] * max_num_seqs

    def build(self, plan: list[Slice]) -> Batch:
        """The tensors of one step; the slices come end to end, in the plan's order."""
        for piece in plan:
            self._catch_up(piece.seq)
        rows = np.array([piece.seq.row for piece in plan])
        counts = np.array([piece.count for piece in plan])
        starts = np.array([piece.seq.num_computed for piece in plan])
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

    def _catch_up(self, seq: Sequence) -> None:
        """Write what the sequence gained since its last step, or all of it on a new stay."""
        row = seq.row
        if self._stays[row] is not seq.block_table:
            self._stays[row], self._num_tokens[row], self._num_blocks[row] = seq.block_table, 0, 0
        written, known = self._num_tokens[row], len(seq.token_ids)
        if written < known:
            self._tokens[row, written:known] = seq.token_ids[written:]
            self._num_tokens[row] = known
        written, known = self._num_blocks[row], len(seq.block_table)
        if written < known:
            self._tables[row, written:known] = seq.block_table[written:]
            self._num_blocks[row] = known

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
