"""Paged attention: reference and tiled form against torch's own, Triton against the reference."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from penstock.kernels.attention.latent_attention_triton import (
    fitting_latent_tile,
    latent_attention_triton,
)
from penstock.kernels.attention.paged_attention_ref import paged_attention_ref
from penstock.kernels.attention.paged_attention_tiled import paged_attention_tiled
from penstock.kernels.attention.paged_attention_triton import (
    Tile,
    fitting_tile,
    paged_attention_triton,
)
from penstock.kernels.attention.spans import Scoring, Spans
from penstock.kernels.numbers.fp8 import FP8

# (query length, context length) of each sequence
DECODES = [(1, 1), (1, 16), (1, 17), (1, 80), (1, 333)]
MIXED = [(1, 40), (15, 15), (33, 50), (1, 1), (100, 100), (7, 130)]
SMALL = [(1, 21), (5, 5), (3, 40)]


def make(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Spans]:
    """Queries, a cache whose blocks are dealt at random, and a table that is a strided view."""
    generator = torch.Generator().manual_seed(3)
    needed = [-(-context // block_size) for _, context in lengths]
    order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    table = torch.full((len(lengths), max(needed) * 2 + 3), 10**6, dtype=torch.int32)[:, ::2]
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    cache = torch.randn(
        (sum(needed) + 4, kv_heads, 2, block_size, head_dim), generator=generator
    ).to(dtype)
    ends = torch.tensor([0] + [query for query, _ in lengths]).cumsum(0)
    query = torch.randn((int(ends[-1]), heads, head_dim), generator=generator).to(dtype)
    spans = Spans(
        ends.to(torch.int32),
        torch.tensor([context for _, context in lengths], dtype=torch.int32),
        table,
        max(query for query, _ in lengths),
        max(context for _, context in lengths),
    )
    return query, cache, spans


def expected(query: Tensor, cache: Tensor, spans: Spans, scoring: Scoring) -> Tensor:
    """Key by key through the block table, then a plain softmax in float64."""
    block_size, out = cache.shape[3], []
    starts = spans.query_start.tolist()
    for seq, context in enumerate(spans.context_lens.tolist()):
        table = spans.block_tables[seq].tolist()
        kv = torch.stack(
            [cache[table[p // block_size], :, :, p % block_size] for p in range(context)], 2
        ).double()
        rows = query[starts[seq] : starts[seq + 1]].double().transpose(0, 1)
        position = torch.arange(context - rows.shape[1], context)[:, None]
        key = torch.arange(context)
        seen = (key <= position) & (key > position - (scoring.window or context))
        kv = kv.repeat_interleave(query.shape[1] // cache.shape[1], 0)
        scores = rows @ kv[:, 0].transpose(1, 2) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        if scoring.sinks is not None:
            sinks = scoring.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        attended = scores.softmax(-1)[..., :context] @ kv[:, 1]
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("attention", [paged_attention_ref, paged_attention_tiled])
@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size", [(8, 2, 64, 16), (9, 3, 48, 32), (5, 1, 96, 10)]
)
def test_attention_equals_torch(attention, lengths, window, heads, kv_heads, head_dim, block_size):
    query, cache, spans = make(lengths, heads, kv_heads, head_dim, block_size)
    got = attention(query, cache, spans, Scoring(0.2, window))
    wanted = expected(query, cache, spans, Scoring(0.2, window)).float()
    assert_close(got, wanted, atol=2e-5, rtol=1e-5)


def row_alone(spans: Spans, seq: int, context: int) -> Spans:
    """Return spans of one query row, the last of a sequence's first `context` tokens."""
    return Spans(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        spans.block_tables[seq : seq + 1],
        1,
        context,
    )


def scorings(heads: int) -> list[Scoring]:
    """A soft cap low enough to count, and sinks above and below most scores."""
    sinks = torch.linspace(-4, 4, heads)
    return [Scoring(0.3, 20, 1.5), Scoring(0.2, None, None, sinks), Scoring(0.3, 20, 2.0, sinks)]


@pytest.mark.parametrize(
    "attention", [paged_attention_ref, paged_attention_tiled, paged_attention_triton]
)
@pytest.mark.parametrize("lengths", [DECODES, SMALL], ids=["decodes", "small"])
def test_soft_caps_and_sinks_count(attention, lengths):
    query, cache, spans = make(lengths, 6, 2, 64)
    for scoring in scorings(6):
        got = attention(query, cache, spans, scoring)
        assert_close(got, expected(query, cache, spans, scoring).float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [paged_attention_ref, paged_attention_tiled])
def test_bf16_attention_is_near_the_exact_one(attention):
    query, cache, spans = make(MIXED, 6, 2, 64, dtype=torch.bfloat16)
    got = attention(query, cache, spans, Scoring(0.125))
    assert_close(got.double(), expected(query, cache, spans, Scoring(0.125)), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("attention", [paged_attention_ref, paged_attention_tiled])
@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_latent_is_key_and_value(attention, lengths):
    query, cache, spans = make(lengths, 6, 1, 48)
    cache[:, :, 1] = cache[:, :, 0]
    wanted = expected(query, cache, spans, Scoring(0.2))[..., :32]
    got = attention(query, cache[:, :, :1].contiguous(), spans, Scoring(0.2), latent=32)
    assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_many_sequences_are_gathered_in_several_parts():
    lengths = [(1, 1 + 37 * step % 900) for step in range(90)]
    query, cache, spans = make(lengths, 4, 4, 64)
    got = paged_attention_ref(query, cache, spans, Scoring(0.125))
    wanted = expected(query, cache, spans, Scoring(0.125)).float()
    assert_close(got, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths, heads, kv_heads, head_dim, window",
    [
        (SMALL, 4, 2, 64, None),
        (SMALL, 3, 1, 128, 7),
        (SMALL, 4, 2, 96, 7),
        (SMALL, 2, 2, 8, None),
        ([(19, 70)], 6, 2, 64, None),
        ([(20, 20), (1, 9)], 1, 1, 64, 5),
    ],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_triton_equals_the_reference(lengths, heads, kv_heads, head_dim, window, dtype, tolerance):
    query, cache, spans = make(lengths, heads, kv_heads, head_dim, dtype=dtype)
    got = paged_attention_triton(query, cache, spans, Scoring(0.15, window))
    wanted = paged_attention_ref(query, cache, spans, Scoring(0.15, window))
    assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("window, head_dim", [(None, 64), (600, 64), (None, 48)])
def test_a_split_query_is_merged_to_the_same(window, head_dim, poisoned):
    query, cache, spans = make([(1, 1030), (1, 3)], 2, 1, head_dim)
    got = paged_attention_triton(query, cache, spans, Scoring(0.125, window))
    wanted = paged_attention_ref(query, cache, spans, Scoring(0.125, window))
    assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    whole = paged_attention_triton(query, cache, spans, Scoring(0.125, window), deterministic=True)
    assert_close(whole, wanted, atol=1e-5, rtol=1e-5)


def test_a_sink_counts_once_in_a_split_query():
    query, cache, spans = make([(1, 1030), (1, 3)], 2, 1, 64)
    for scoring in scorings(2):
        got = paged_attention_triton(query, cache, spans, scoring)
        assert_close(got, expected(query, cache, spans, scoring).float(), atol=1e-5, rtol=1e-5)


def test_queries_are_read_through_their_strides():
    query, cache, spans = make(SMALL, 4, 2, 64)
    wide = torch.cat((query, query), 1)[:, :4]
    assert not wide.is_contiguous()
    for attention in (paged_attention_ref, paged_attention_tiled, paged_attention_triton):
        got = attention(wide, cache, spans, Scoring(0.125))
        assert_close(got, attention(query, cache, spans, Scoring(0.125)), atol=0, rtol=0)


@pytest.mark.parametrize("shared_kib", [227, 163, 99, 64])
@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("row_bytes", [32, 128, 256, 512, 1024])
def test_a_tile_fits_the_memory_that_its_processor_shares(shared_kib, decodes, row_bytes):
    """Of the H200, the A100, the RTX 4090, and the T4."""
    tile = fitting_tile(decodes, row_bytes, shared_kib * 2**10)
    assert (tile.rows + 2 * tile.keys * tile.num_stages) * row_bytes <= shared_kib * 2**10
    assert min(tile.rows, tile.keys) >= 16


@pytest.mark.parametrize("tile", [Tile(32, 16, 4, 1), Tile(16, 128, 2, 2)])
def test_any_tile_gives_the_same(tile):
    query, cache, spans = make(MIXED[:3], 4, 2, 64)
    got = paged_attention_triton(query, cache, spans, Scoring(0.15, 20), tile=tile)
    wanted = paged_attention_ref(query, cache, spans, Scoring(0.15, 20))
    assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def make_latents(
    lengths: list[tuple[int, int]],
    heads: int,
    latent: int,
    size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Spans, Tensor]:
    """Queries, a cache of latents, spans, and what is expected, each latent a key and a value."""
    query, cache, spans = make(lengths, heads, 1, size, block_size, dtype)
    cache[:, :, 1] = cache[:, :, 0]
    wanted = expected(query, cache, spans, Scoring(0.1))[..., :latent]
    return query, cache[:, :, :1].contiguous(), spans, wanted


@pytest.mark.parametrize(
    "lengths, heads, latent, size, block_size",
    [
        (SMALL, 6, 32, 48, 16),
        (SMALL, 16, 64, 72, 16),
        ([(9, 70), (1, 64)], 20, 40, 56, 10),
        ([(1, 1), (1, 33), (1, 90)], 3, 16, 32, 16),
    ],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_triton_attends_to_latents(lengths, heads, latent, size, block_size, dtype, tolerance):
    query, cache, spans, wanted = make_latents(lengths, heads, latent, size, block_size, dtype)
    got = latent_attention_triton(query, cache, spans, Scoring(0.1), latent)
    assert got.shape == wanted.shape and got.dtype == dtype
    assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def test_latents_split_along_the_keys_are_merged_to_the_same():
    """Parts without a key, and parts of which a row sees none, have no weight."""
    query, cache, spans, wanted = make_latents([(1, 150), (3, 40), (1, 2)], 5, 24, 40)
    got = latent_attention_triton(query, cache, spans, Scoring(0.1), 24, splits=4)
    assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_latents_of_a_row_have_the_same_bits_beside_others():
    query, cache, spans, _ = make_latents([(1, 400), (1, 9), (12, 300)], 6, 32, 48)
    whole = latent_attention_triton(query, cache, spans, Scoring(0.1), 32, deterministic=True)
    for seq, (start, stop) in enumerate([(0, 1), (1, 2), (13, 14)]):
        alone = Spans(
            torch.tensor([0, stop - start], dtype=torch.int32),
            spans.context_lens[seq : seq + 1],
            spans.block_tables[seq : seq + 1],
            stop - start,
            int(spans.context_lens[seq]),
        )
        rows = query[start:stop]
        got = latent_attention_triton(rows, cache, alone, Scoring(0.1), 32, deterministic=True)
        assert torch.equal(got, whole[start:stop])


@pytest.mark.parametrize(
    "heads, row_bytes, shared_kib, tile",
    [
        (128, 1152, 227, Tile(64, 32, 8, 2)),
        (128, 1152, 163, Tile(64, 32, 8, 2)),
        (128, 1152, 99, Tile(32, 32, 8, 2)),
        (128, 2304, 99, Tile(16, 16, 4, 2)),
        (16, 1152, 227, Tile(16, 32, 4, 2)),
        (16, 1152, 48, Tile(16, 16, 4, 2)),
        (16, 2304, 32, Tile(16, 16, 4, 2)),
    ],
)
def test_a_tile_of_latents_is_one_that_was_compiled_to_fit(heads, row_bytes, shared_kib, tile):
    assert fitting_latent_tile(heads, row_bytes, shared_kib * 1024) == tile


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_keys_and_values_of_eight_bits_are_read(dtype, tolerance):
    query, cache, spans = make(SMALL, 6, 2, 64, dtype=dtype)
    cache, scoring = cache.to(FP8), Scoring(0.1)
    got = paged_attention_triton(query, cache, spans, scoring)
    wanted = expected(query, cache.to(dtype), spans, scoring)
    assert got.dtype == dtype
    assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)

    query, cache, spans = make(SMALL, 6, 1, 48, dtype=dtype)
    cache = cache[:, :, :1].contiguous().to(FP8)
    got = latent_attention_triton(query, cache, spans, scoring, 32)
    wide = cache.to(dtype).repeat(1, 1, 2, 1, 1)
    wanted = expected(query, wide, spans, scoring)[..., :32]
    assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
