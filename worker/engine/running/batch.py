"""The persistent batch: the host's copy of the running sequences, and a step's tensors made of it.

These are token ids, positions, the slot mapping and the block tables.
"""

import numpy as np
import torch

from penstock.kernels.numbers.transfers import send
from penstock.worker.engine.sequences.columns import Columns, Numbers
from penstock.worker.engine.sequences.sequence import Plan, Sequence
from penstock.worker.layers.batch import Batch, HostSlices


class PersistentBatch:
    """A table with one row for each running sequence: its tokens and its block table.

    Rows are appended to and never rebuilt. They are as wide as the longest sequence may be; their
    memory pages are touched only as far as tokens were written.
    """

    def __init__(
        self, columns: Columns, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        max_num_seqs = len(columns.stay)
        self.block_size = block_size
        self.device = device
        width = -(-max_model_len // block_size)
        self._tokens = np.zeros((max_num_seqs, width * block_size), np.int32)
        self._tables = np.zeros((max_num_seqs, width), np.int32)
        self._columns = columns
        # How far each row is written here.
        self._num_tokens, self._num_blocks, self._stay = np.zeros((3, max_num_seqs), np.int64)

    def build(self, plan: Plan) -> Batch:
        """Return the tensors of one step; the slices come end to end, in the plan's order."""
        rows, starts, counts = plan.rows, plan.starts, plan.counts
        self._catch_up(plan.seqs, rows)
        query_start = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        contexts = starts + counts
        if plan.is_decode:
            row_of, positions = rows, starts
        else:
            row_of = np.repeat(rows, counts)
            positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        longest = int(contexts.max())
        width = -(-longest // self.block_size)
        place, offset = np.divmod(positions, self.block_size)
        slots = self._tables[row_of, place] * np.int64(self.block_size) + offset
        arrays = [
            self._tokens[row_of, positions].astype(np.int64),
            positions,
            slots,
            query_start,
            contexts.astype(np.int32),
            self._tables[rows, :width],
        ]
        tensors = send(arrays, self.device)
        token_ids, places, slot_mapping, starts_of_rows, context_lens, tables = tensors
        return Batch(
            token_ids,
            places,
            slot_mapping,
            starts_of_rows,
            context_lens,
            tables,
            max_query_len=int(counts.max()),
            max_context_len=longest,
            slices=HostSlices(*map(torch.from_numpy, (rows, starts, counts))),
        )

    def _catch_up(self, seqs: list[Sequence], rows: Numbers) -> None:
        """Write what each sequence gained since its last step: as a rule one token and no block."""
        columns = self._columns
        num_tokens, num_blocks, stay = (
            columns.num_tokens[rows],
            columns.num_blocks[rows],
            columns.stay[rows],
        )
        gained_more = num_tokens > self._num_tokens[rows] + 1
        gained_more |= num_blocks != self._num_blocks[rows]
        gained_more |= stay != self._stay[rows]
        self._tokens[rows, num_tokens - 1] = columns.last_token[rows]
        for at in np.flatnonzero(gained_more).tolist():
            self._write(seqs[at])
        self._num_tokens[rows], self._num_blocks[rows] = num_tokens, num_blocks

    def _write(self, seq: Sequence) -> None:
        """Write what the sequence gained, or all of it when it has been given a row again."""
        row = seq.row
        if self._stay[row] != self._columns.stay[row]:
            self._stay[row] = self._columns.stay[row]
            self._num_tokens[row] = self._num_blocks[row] = 0
        start, end = int(self._num_tokens[row]), len(seq.token_ids)
        self._tokens[row, start:end] = seq.token_ids[start:]
        start, end = int(self._num_blocks[row]), len(seq.block_table)
        self._tables[row, start:end] = seq.block_table[start:]
