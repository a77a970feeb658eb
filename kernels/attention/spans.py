"""The spans of a batch: the rows of each sequence, the places of its keys, and how they weigh.

How heads share keys (GQA, MQA), the sliding window, attention sinks and the soft cap are here.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """The rows and the keys of all sequences in a batch, on the device.

    Row r of sequence i's queries stands at position context_lens[i] - (its query length) + r.

    query_start   [seqs + 1]          int32; sequence i's rows are query_start[i]:query_start[i+1]
    context_lens  [seqs]              int32; number of keys of each sequence, its own rows' included
    block_tables  [seqs, max_blocks]  int32; any strides; entries past a sequence's last are unread
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The numbers of heads and their size, which queries, keys and values share.

    Consecutive query heads share a key head.

    latent  values are the first so many numbers of the keys, and are not stored besides; None means
            that they have numbers of their own
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: int | None = None

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def parts(self) -> int:
        """Return how many parts of a cache there are: keys and values, or keys alone."""
        return 1 if self.latent else 2

    @property
    def rows(self) -> list[int]:
        """Return how many numbers queries, keys and values have for each token."""
        return [heads * self.head_dim for heads in (self.num_heads, *(self.num_kv_heads,) * 2)]

    @property
    def group(self) -> int:
        """Return the number of query heads of one key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class KvScales:
    """The factors of a layer's keys and values of fp8, as they stand in the cache."""

    key: float = 1.0
    value: float = 1.0


NO_SCALES = KvScales()


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How the keys that a query sees are weighed: by a softmax over scores.

    scale    a score is this times the product of query and key
    window   a query sees this many keys, its own included; None means all before it
    softcap  a score s becomes softcap * tanh(s / softcap); None leaves it as it is
    sinks    [heads] float32; each is a score more in the sum of its head, without a value
    scales   of a cache of fp8
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scales: KvScales = NO_SCALES


def with_key_scale(scoring: Scoring) -> Scoring:
    """Return the scoring of products with keys as they stand in a cache."""
    factor = scoring.scales.key
    return scoring if factor == 1 else replace(scoring, scale=scoring.scale * factor)


def by_value_scale(result: Tensor, scales: KvScales) -> Tensor:
    """Multiply a mixture of values as they stand in a cache, in place."""
    return result if scales.value == 1 else result.mul_(scales.value)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence, on the host: query rows start:stop see keys first_key:context at most."""

    seq: int
    start: int
    stop: int
    first_key: int
    context: int

    @property
    def first_position(self) -> int:
        return self.context - (self.stop - self.start)

    def blocks(self, block_size: int) -> tuple[int, int]:
        """Return the first column of the block table that the span reads, and the end."""
        return self.first_key // block_size, -(-self.context // block_size)


def read_spans(spans: Spans, window: int | None) -> list[Span]:
    """Return the spans of the sequences that have rows.

    It waits for the device if the tensors are not on the host.
    """
    return [
        Span(seq, start, stop, first_seen(context - (stop - start), window), context)
        for seq, ((start, stop), context) in enumerate(
            zip(pairwise(spans.query_start.tolist()), spans.context_lens.tolist(), strict=True)
        )
        if stop > start
    ]


def first_seen(position: int, window: int | None) -> int:
    """Return the position of the oldest key that a query sees; a window includes its own key."""
    return 0 if window is None else max(0, position - window + 1)
