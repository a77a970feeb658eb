"""Paged attention that is deterministic (batch-invariant): no query's bits depend on the others.

Products have one fixed shape: a tile of query rows by a tile of keys. Key tiles are counted from
position 0 and taken in order with a running softmax in float32; a key that a query does not see
adds an exact zero. So neither the batch nor the cut of a prompt into slices changes a bit. The
method needs operations whose result for a row depends on that row alone: `bmm` of a fixed shape,
`exp`, and reductions over a last dimension of fixed length.
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

_KEYS = 128
# Rows of a product; a query has one row for each head of its group.
_STACKED_ROWS = 16
# Query tiles that advance together, few enough that their gathers stay small.
_TILES_TOGETHER = 64
# Below every score, and finite, so that hidden keys weigh exactly zero before any key is seen.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class _Advance:
    """One step of the loop: a key tile for each of the first n query tiles.

    tiles   [parts * n * kv_heads * blocks]  rows of the flat cache
    hidden  [n, 1, rows * group, keys]   bool; None where no key is hidden
    """

    num_tiles: int
    tiles: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class _Together:
    """Query tiles that advance together; those that see the most key tiles come first.

    rows      [tiles * rows a tile]  rows of the query tensor; the last of a tile may repeat
    places    [queries]              the places in `rows` that are not repeats
    """

    rows: Tensor
    places: Tensor
    advances: list[_Advance]


@dataclass(frozen=True, slots=True)
class TilePlan:
    shape: HeadShape
    block_size: int
    together: list[_Together]


def paged_attention_tiled(
    query: Tensor, kv_cache: Tensor, spans: Spans, scoring: Scoring, latent: int | None = None
) -> Tensor:
    shape = HeadShape(query.shape[1], kv_cache.shape[1], query.shape[2], latent)
    tiles = plan_tiles(spans, shape, kv_cache, scoring.window)
    return attend_tiles(query, kv_cache, tiles, scoring)


def plan_tiles(spans: Spans, shape: HeadShape, kv_cache: Tensor, window: int | None) -> TilePlan:
    """Plan the tiles of a step. kv_cache, that of any layer, gives the block size."""
    block_size = kv_cache.shape[3]
    blocks = _Blocks(spans.block_tables, shape, block_size, max(1, _KEYS // block_size))
    rows = max(1, _STACKED_ROWS // shape.group)
    tiles = [
        _tile(span, start, min(start + rows, span.stop), window, blocks.keys)
        for span in read_spans(spans, window)
        for start in range(span.start, span.stop, rows)
    ]
    tiles.sort(key=lambda tile: tile.end - tile.first, reverse=True)
    together = [
        _together(tiles[start : start + _TILES_TOGETHER], rows, blocks, window)
        for start in range(0, len(tiles), _TILES_TOGETHER)
    ]
    return TilePlan(shape, block_size, together)


def attend_tiles(query: Tensor, kv_cache: Tensor, plan: TilePlan, scoring: Scoring) -> Tensor:
    """Compute the attention: query [tokens, heads, head_dim] -> [tokens, heads, value_dim]."""
    scoring = with_key_scale(scoring)
    out = query.new_empty(*query.shape[:2], plan.shape.value_dim)
    for together in plan.together:
        rows = query.index_select(0, together.rows)
        mix = _attend_together(rows, kv_cache, together, plan.shape, scoring)
        mix = by_value_scale(mix, scoring.scales)
        out.index_copy_(0, together.rows[together.places], mix.to(query.dtype)[together.places])
    return out


def _attend_together(
    rows: Tensor, kv_cache: Tensor, together: _Together, shape: HeadShape, scoring: Scoring
) -> Tensor:
    """Compute some tiles: rows [tiles * rows, heads, head_dim] -> [.., value_dim], float32."""
    kv_heads, group, head_dim = shape.num_kv_heads, shape.group, shape.head_dim
    block_size, width = kv_cache.shape[3:]
    flat = flat_rows(kv_cache, block_size * width)
    num_tiles = together.advances[0].num_tiles
    # [tiles * kv_heads, rows * group, head_dim]
    queries = rows.view(num_tiles, -1, kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(num_tiles * kv_heads, -1, head_dim)
    top = torch.full(queries.shape[:2], _LOWEST, dtype=torch.float32, device=rows.device)
    total, mix = torch.zeros_like(top), top.new_zeros(*top.shape, shape.value_dim)
    if scoring.sinks is not None:
        by_head = scoring.sinks.view(kv_heads, group)
        top = by_head.repeat(num_tiles, top.shape[1] // group)
        total += 1
    for advance in together.advances:
        pairs = advance.num_tiles * kv_heads
        blocks = flat.index_select(0, advance.tiles)
        numbers = blocks.view(shape.parts, pairs, -1, width)
        parts = widened(numbers, kv_cache.dtype, rows.dtype)
        key, value = parts[0], parts[-1][..., : shape.value_dim]
        scores = torch.bmm(queries[:pairs], key.transpose(1, 2)).float().mul_(scoring.scale)
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if advance.hidden is not None:
            by_tile = scores.view(advance.num_tiles, kv_heads, *scores.shape[1:])
            by_tile.masked_fill_(advance.hidden, -torch.inf)
        before = top[:pairs]
        now = torch.maximum(before, scores.amax(-1))
        fade = (before - now).exp_()
        weight = scores.sub_(now[..., None]).exp_()
        total[:pairs] = total[:pairs] * fade + weight.sum(-1)
        mix[:pairs] = mix[:pairs] * fade[..., None] + torch.bmm(weight.to(value.dtype), value)
        top[:pairs] = now
    mix /= total[..., None]
    by_row = mix.view(num_tiles, kv_heads, -1, group, shape.value_dim).transpose(1, 2)
    return by_row.reshape(*rows.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile: query rows start:stop of sequence `seq`, the first at `position`.

    The rows see the key tiles first:end.
    """

    seq: int
    start: int
    stop: int
    position: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The block tables, divided into key tiles of `per_tile` blocks."""

    tables: Tensor
    shape: HeadShape
    block_size: int
    per_tile: int

    @property
    def keys(self) -> int:
        return self.per_tile * self.block_size

    def tiles(self, seqs: Tensor, first: Tensor, ends: Tensor) -> Tensor:
        """Return the flat cache's rows of one key tile each, with blocks from `first` on.

        They are ordered by keys or values, tile, kv head and block. Blocks from `ends` on are
        replaced by the last one before.
        """
        ahead = first[:, None] + torch.arange(self.per_tile, device=seqs.device)
        blocks = self.tables[seqs[:, None], torch.minimum(ahead, ends[:, None] - 1)]
        heads = torch.arange(self.shape.num_kv_heads, device=seqs.device)[:, None]
        keys = (blocks.to(torch.int64)[:, None] * self.shape.num_kv_heads + heads).view(-1)
        return torch.cat([keys * self.shape.parts + part for part in range(self.shape.parts)])


def _tile(span: Span, start: int, stop: int, window: int | None, keys: int) -> _Tile:
    position = span.first_position + start - span.start
    last_position = position + stop - start - 1
    first = first_seen(position, window) // keys
    return _Tile(span.seq, start, stop, position, first, last_position // keys + 1)


def _together(tiles: list[_Tile], rows: int, blocks: _Blocks, window: int | None) -> _Together:
    device = blocks.tables.device
    columns = [
        (tile.seq, tile.start, tile.stop - tile.start, tile.position, tile.first) for tile in tiles
    ]
    seqs, start, length, position, first = torch.tensor(columns, device=device).T
    row = torch.arange(rows, device=device)
    ahead = torch.minimum(row, length[:, None] - 1)
    positions = position[:, None] + ahead
    # The end of the blocks that a tile's last row sees; later blocks may not exist.
    ends = torch.div(position + length - 1, blocks.block_size, rounding_mode="floor") + 1
    advances = []
    for step in range(tiles[0].end - tiles[0].first):
        count = sum(tile.end - tile.first > step for tile in tiles)
        key_tile = first[:count] + step
        keys = key_tile[:, None] * blocks.keys + torch.arange(blocks.keys, device=device)
        hidden = keys[:, None] > positions[:count, :, None]
        if window is not None:
            hidden |= keys[:, None] <= positions[:count, :, None] - window
        mask = hidden.repeat_interleave(blocks.shape.group, 1)[:, None]
        cache_rows = blocks.tiles(seqs[:count], key_tile * blocks.per_tile, ends[:count])
        advances.append(_Advance(count, cache_rows, mask if bool(mask.any()) else None))
    places = (row < length[:, None]).view(-1).nonzero()[:, 0]
    return _Together((start[:, None] + ahead).view(-1), places, advances)
