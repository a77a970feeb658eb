"""The tensors that one forward pass reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostSlices:
    """The slices as the host knows them, int64 [seqs]: `counts` tokens from `starts` on.

    rows  where the engine keeps the sequences while they run
    """

    rows: Tensor
    starts: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The slices of several sequences; sequence i's rows are query_start[i]:query_start[i+1].

    token_ids     [tokens]            int64
    positions     [tokens]            int64; the position of each token in its own sequence
    slot_mapping  [tokens]            int64; the slot for its KV: block * block_size + offset
    query_start   [seqs + 1]          int32
    context_lens  [seqs]              int32; tokens whose KV exists after this pass
    block_tables  [seqs, max_blocks]  int32; entries past a sequence's last block are unread
    slices        None where nothing is to be kept of the sequences but keys and values
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int
    slices: HostSlices | None = None
