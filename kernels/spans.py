"""Which rows of a batch belong to which sequence, and where each sequence's keys lie."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """Row r of sequence i's queries stands at position context_lens[i] - (its query length) + r.

    query_start   [seqs + 1]          int32; sequence i's rows are query_start[i]:query_start[i+1]
    context_lens  [seqs]              int32; keys of each sequence, those of its own rows included
    block_tables  [seqs, max_blocks]  int32; any strides; entries past a sequence's last are unread
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Consecutive query heads share a key head. One head size for queries, keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Span:
    """Sequence `seq` on the host: query rows start:stop see keys first_key:context at most."""

    seq: int
    start: int
    stop: int
    first_key: int
    context: int

    @property
    def first_position(self) -> int:
        return self.context - (self.stop - self.start)

    def blocks(self, block_size: int) -> tuple[int, int]:
        """Columns of the block table, from and to."""
        return self.first_key // block_size, -(-self.context // block_size)


def read_spans(spans: Spans, window: int | None) -> list[Span]:
    """The sequences that have rows. Waits for the device if the tensors are not the host's."""
    return [
        Span(seq, start, stop, first_seen(context - (stop - start), window), context)
        for seq, ((start, stop), context) in enumerate(
            zip(pairwise(spans.query_start.tolist()), spans.context_lens.tolist(), strict=True)
        )
        if stop > start
    ]


def first_seen(position: int, window: int | None) -> int:
    """The oldest key that a query sees; a window counts its own."""
    return 0 if window is None else max(0, position - window + 1)
