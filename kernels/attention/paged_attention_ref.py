"""Paged attention in plain torch: it gathers keys and values, then multiplies.

The indices are the same in all layers of a step, so they are planned once (`plan_gathers`) and used
by every layer (`attend`). Batched products beat SDPA here: on a CPU without AMX its bf16 kernel
takes three to four times as long.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.spans import (
    HeadShape,
    Scoring,
    Span,
    Spans,
    by_value_scale,
    first_seen,
    read_spans,
    with_key_scale,
)
from penstock.kernels.numbers.eight_bits import flat_rows, widened

# Sequences whose numbers of blocks have this ratio or a closer one are padded to the longest.
_CLOSE = 0.75
# Up to this many blocks the padding costs less than another gather.
_FEW_BLOCKS = 4
# The most that one gather copies, so that it stays in the processor's cache until it is read.
_GATHER_BYTES = 8 << 20
# Query rows of one product, all heads of a group counted. Keys after the last row are not read.
_STACKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The one-token queries of n sequences of similar length.

    rows   [n]                               rows of the query tensor
    tiles  [parts * n * kv_heads * max_blocks]   rows of block_size * head_dim of the flat cache
    mask   [n * kv_heads, 1, keys]           0 or -inf
    """

    rows: Tensor
    tiles: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of some rows of a slice with the keys first:last of its gather.

    tail  [rows * group, up to rows]  0 or -inf, the mask of the last keys: those of the rows
          themselves
    head  the mask of the first keys, which leave the window one by one; None where none does
    """

    start: int
    stop: int
    first: int
    last: int
    tail: Tensor
    head: Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A slice of several tokens: rows start:stop. tiles [parts * kv_heads * blocks]."""

    start: int
    stop: int
    tiles: Tensor
    products: list[_Product]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The plan of a step's gathers and products, the same for all layers.

    scratch  memory for the largest gather; new memory each time would cost more than the copy
    """

    shape: HeadShape
    decodes: list[_Decodes]
    prefills: list[_Prefill]
    scratch: Tensor


def paged_attention_ref(
    query: Tensor, kv_cache: Tensor, spans: Spans, scoring: Scoring, latent: int | None = None
) -> Tensor:
    shape = HeadShape(query.shape[1], kv_cache.shape[1], query.shape[2], latent)
    return attend(query, kv_cache, plan_gathers(spans, shape, kv_cache, scoring.window), scoring)


def plan_gathers(
    spans: Spans, shape: HeadShape, kv_cache: Tensor, window: int | None
) -> GatherPlan:
    """Plan the gathers of a step. kv_cache, of any layer, gives block size, type and device."""
    dtype = torch.float32 if kv_cache.itemsize == 1 else kv_cache.dtype
    tables = _Tables(spans.block_tables, shape, kv_cache.shape[3], dtype)
    span_list = read_spans(spans, window)
    singles = [span for span in span_list if span.stop - span.start == 1]
    decodes = [_decodes(group, tables) for group in _alike(singles, tables)]
    prefills = [_prefill(span, tables, window) for span in span_list if span.stop - span.start > 1]
    gathers = [part.tiles for part in decodes] + [part.tiles for part in prefills]
    longest = max((tiles.numel() for tiles in gathers), default=0)
    flat = flat_rows(kv_cache, tables.block_size * kv_cache.shape[4])
    scratch = flat.new_empty(longest, flat.shape[1])
    return GatherPlan(shape, decodes, prefills, scratch)


def attend(query: Tensor, kv_cache: Tensor, plan: GatherPlan, scoring: Scoring) -> Tensor:
    """Compute the attention: query [tokens, heads, head_dim] -> [tokens, heads, value_dim]."""
    shape, scoring = plan.shape, with_key_scale(scoring)
    queries = query.view(-1, shape.num_kv_heads, shape.group, shape.head_dim)
    out = queries.new_empty(*queries.shape[:3], shape.value_dim)
    for decodes in plan.decodes:
        key, value = _gather(kv_cache, decodes.tiles, plan, decodes.mask.shape[0], query.dtype)
        rows = queries.index_select(0, decodes.rows).view(-1, shape.group, shape.head_dim)
        scores = _scores(rows, key, scoring, decodes.mask)
        mix = torch.bmm(_weights(scores, scoring, shape), value)
        out.index_copy_(0, decodes.rows, mix.view(-1, *out.shape[1:]))
    for prefill in plan.prefills:
        key, value = _gather(kv_cache, prefill.tiles, plan, shape.num_kv_heads, query.dtype)
        rows = queries[prefill.start : prefill.stop].transpose(0, 1)
        for product in prefill.products:
            keys = slice(product.first, product.last)
            mix = _attend_product(
                rows[:, product.start : product.stop].flatten(1, 2),
                key[:, keys],
                value[:, keys],
                product,
                scoring,
                shape,
            )
            first = prefill.start + product.start
            out[first : first + product.stop - product.start] = mix.view(
                shape.num_kv_heads, -1, shape.group, shape.value_dim
            ).transpose(0, 1)
    result = out.view(len(query), shape.num_heads, -1)
    return by_value_scale(result, scoring.scales)


def _gather(
    kv_cache: Tensor, tiles: Tensor, plan: GatherPlan, pairs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values [pairs, keys, .. dim]; a pair is a sequence and a key head."""
    blocks = plan.scratch[: tiles.numel()]
    torch.index_select(flat_rows(kv_cache, blocks.shape[1]), 0, tiles, out=blocks)
    rows = blocks.view(plan.shape.parts, pairs, -1, kv_cache.shape[4])
    parts = widened(rows, kv_cache.dtype, dtype)
    return parts[0], parts[-1][..., : plan.shape.value_dim]


def _attend_product(
    rows: Tensor, key: Tensor, value: Tensor, product: _Product, scoring: Scoring, shape: HeadShape
) -> Tensor:
    """Compute the attention of rows [kv_heads, rows * group, head_dim] to the product's keys."""
    scores = _scores(rows, key, scoring)
    scores[..., -product.tail.shape[1] :] += product.tail
    if product.head is not None:
        scores[..., : product.head.shape[1]] += product.head
    return torch.bmm(_weights(scores, scoring, shape), value)


def _scores(rows: Tensor, key: Tensor, scoring: Scoring, mask: Tensor | None = None) -> Tensor:
    """Return the scores [pairs, rows, keys], with what a mask [pairs, 1, keys] adds."""
    if mask is not None and scoring.softcap is None:
        return torch.baddbmm(mask.to(rows.dtype), rows, key.transpose(1, 2), alpha=scoring.scale)
    scores = torch.baddbmm(
        rows.new_empty(()), rows, key.transpose(1, 2), beta=0, alpha=scoring.scale
    )
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores if mask is None else scores.add_(mask)


def _weights(scores: Tensor, scoring: Scoring, shape: HeadShape) -> Tensor:
    """Return the weights of scores [n * kv_heads, rows * group, keys]."""
    if scoring.sinks is None:
        return scores.softmax(-1)
    pairs, rows = scores.shape[:2]
    by_head = scoring.sinks.to(scores.dtype).view(shape.num_kv_heads, shape.group)
    sinks = by_head.repeat(pairs // shape.num_kv_heads, rows // shape.group)[..., None]
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


@dataclass(frozen=True, slots=True)
class _Tables:
    """The block tables, with the numbers that turn block ids into rows of the flat cache."""

    blocks: Tensor
    shape: HeadShape
    block_size: int
    dtype: torch.dtype

    def tiles(self, blocks: Tensor) -> Tensor:
        """Return the flat cache's rows of blocks [n, max_blocks].

        They are ordered by keys or values, n, kv head and block, and flat.
        """
        heads = torch.arange(self.shape.num_kv_heads, device=blocks.device)[:, None]
        keys = (blocks.to(torch.int64)[:, None] * self.shape.num_kv_heads + heads).view(-1)
        return torch.cat([keys * self.shape.parts + part for part in range(self.shape.parts)])

    def mask(self, hidden: Tensor) -> Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, -torch.inf)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block: keys and values of all heads."""
        elements = (
            self.shape.parts * self.shape.num_kv_heads * self.block_size * self.shape.head_dim
        )
        return elements * self.dtype.itemsize


def _alike(singles: list[Span], tables: _Tables) -> list[list[Span]]:
    """Group sequences so that padding to the longest of a group wastes little; longest first."""
    pairs = [(stop - first, span) for span in singles for first, stop in [_blocks(span, tables)]]
    groups: list[list[Span]] = []
    longest = 0
    for num_blocks, span in sorted(pairs, key=lambda pair: pair[0], reverse=True):
        fits = groups and (len(groups[-1]) + 1) * longest * tables.block_bytes <= _GATHER_BYTES
        if fits and (num_blocks >= longest * _CLOSE or longest <= _FEW_BLOCKS):
            groups[-1].append(span)
        else:
            groups.append([span])
            longest = num_blocks
    return groups


def _blocks(span: Span, tables: _Tables) -> tuple[int, int]:
    return span.blocks(tables.block_size)


def _decodes(group: list[Span], tables: _Tables) -> _Decodes:
    device = tables.blocks.device
    columns = [
        (span.seq, span.start, span.first_key, span.context, *_blocks(span, tables))
        for span in group
    ]
    seqs, rows, first_key, context, first_block, end_block = torch.tensor(columns, device=device).T
    first_block, end_block = first_block[:, None], end_block[:, None]
    longest = int((end_block - first_block).max())
    # A shorter sequence repeats its last block, and the mask hides it.
    ahead = first_block + torch.arange(longest, device=device)
    blocks = tables.blocks[seqs[:, None], torch.minimum(ahead, end_block - 1)]
    keys = torch.arange(longest * tables.block_size, device=device)
    positions = first_block * tables.block_size + keys
    hidden = (positions < first_key[:, None]) | (positions >= context[:, None])
    mask = tables.mask(hidden).repeat_interleave(tables.shape.num_kv_heads, 0)[:, None]
    return _Decodes(rows, tables.tiles(blocks), mask)


def _prefill(span: Span, tables: _Tables, window: int | None) -> _Prefill:
    columns = slice(*_blocks(span, tables))
    length = span.stop - span.start
    rows = max(16, _STACKED_ROWS // tables.shape.group)
    return _Prefill(
        span.start,
        span.stop,
        tables.tiles(tables.blocks[span.seq, columns][None]),
        [
            _product(span, start, min(start + rows, length), tables, window)
            for start in range(0, length, rows)
        ],
    )


def _product(span: Span, start: int, stop: int, tables: _Tables, window: int | None) -> _Product:
    """Plan the product of the slice's rows start:stop."""
    offset = _blocks(span, tables)[0] * tables.block_size
    position = span.first_position + start
    first, last = first_seen(position, window), span.first_position + stop
    row = torch.arange(stop - start, device=tables.blocks.device).repeat_interleave(
        tables.shape.group
    )[:, None]
    column = torch.arange(stop - start, device=tables.blocks.device)
    head = None
    if window is not None and (num_leaving := last - window - first) > 0:
        # Row r sees keys from position + r - window + 1 on.
        hidden = first + column[:num_leaving] <= position + row - window
        head = tables.mask(hidden)
    return _Product(start, stop, first - offset, last - offset, tables.mask(column > row), head)
