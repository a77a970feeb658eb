"""Keys and values of 8 bits against torch's own numbers, and attention to what they stand for."""

import ctypes

import pytest
import torch
from test_kernels_attention import DECODES, MIXED, expected, make, row_alone, scorings
from torch import Tensor
from torch.testing import assert_close

from penstock.kernels.attention.paged_attention_panels import paged_attention_panels, to_panels
from penstock.kernels.attention.paged_attention_ref import paged_attention_ref
from penstock.kernels.attention.paged_attention_tiled import paged_attention_tiled
from penstock.kernels.attention.paged_attention_triton import paged_attention_triton
from penstock.kernels.attention.spans import HeadShape, KvScales, Scoring, Spans
from penstock.kernels.cache.rotate_and_store import (
    Places,
    rotate_and_store_panels,
    rotate_and_store_ref,
)
from penstock.kernels.cache.rotate_and_store_triton import rotate_and_store_triton
from penstock.kernels.cache.store_kv import key_rows

FP8 = torch.float8_e4m3fn
KINDS = [FP8, torch.int8]
EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)


def kept_as(x: Tensor, kind: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return rows [.., head_dim] as bytes: torch's own fp8, or int8 of the largest of each row."""
    if kind == FP8:
        return (x.float() / scale).clamp(-448, 448).to(FP8).view(torch.uint8)
    step = x.float().abs().amax(-1, keepdim=True) / 127
    step[step == 0] = 1
    numbers = torch.round(x.float() / step).to(torch.int8)
    return torch.cat((numbers.view(torch.uint8), step.view(torch.uint8)), -1)


def stands_for(rows: Tensor, kind: torch.dtype) -> Tensor:
    if kind == FP8:
        return rows.view(FP8).float()
    return rows[..., :-4].view(torch.int8).float() * rows[..., -4:].contiguous().view(torch.float32)


def make_kept(
    kind: torch.dtype, *shape: object, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Spans]:
    """Queries, a cache of 8 bits, the numbers it stands for, and spans."""
    query, cache, spans = make(*shape, dtype=torch.bfloat16)  # type: ignore[arg-type]
    rows = kept_as(cache * torch.linspace(0.05, 1, cache.shape[3])[:, None], kind, scale)
    return query, rows.view(kind), stands_for(rows, kind) * scale, spans


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lengths", [DECODES, MIXED, [(1, 2100), (70, 1100)]], ids=len)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size",
    [(9, 3, 64, 16), (5, 5, 96, 48), (32, 2, 128, 16), (4, 1, 256, 32)],
)
def test_attention_is_to_what_the_cache_stands_for(
    ops: ctypes.CDLL,
    kind: torch.dtype,
    lengths: list[tuple[int, int]],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    query, cache, numbers, spans = make_kept(kind, lengths, heads, kv_heads, head_dim, block_size)
    scoring = Scoring(0.1, window)
    got = paged_attention_panels(ops, query, to_panels(cache), spans, scoring)
    wanted = expected(query, numbers, spans, scoring)
    assert_close(got.double(), wanted, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scoring", [Scoring(0.1), *scorings(6)], ids=str)
def test_a_row_has_the_same_bits_alone(
    ops: ctypes.CDLL, kind: torch.dtype, scoring: Scoring
) -> None:
    query, cache, numbers, spans = make_kept(kind, MIXED, 6, 2, 64)
    panels = to_panels(cache)
    whole = paged_attention_panels(ops, query, panels, spans, scoring)
    wanted = expected(query, numbers, spans, scoring)
    assert_close(whole.double(), wanted, atol=1.5e-2, rtol=1e-2)
    starts = spans.query_start.tolist()
    for seq, (length, context) in enumerate(MIXED):
        for row in range(0, length, 7):
            alone = row_alone(spans, seq, context - length + row + 1)
            at = slice(starts[seq] + row, starts[seq] + row + 1)
            got = paged_attention_panels(ops, query[at], panels, alone, scoring)
            assert torch.equal(got, whole[at])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_several_sequences_have_in_common_is_read_with_its_scales(
    ops: ctypes.CDLL, kind: torch.dtype
) -> None:
    query, cache, numbers, spans = make_kept(kind, [(1, 300 + seq) for seq in range(40)], 9, 3, 64)
    spans.block_tables[:, :16] = spans.block_tables[0, :16].clone()
    got = paged_attention_panels(ops, query, to_panels(cache), spans, Scoring(0.1))
    wanted = expected(query, numbers, spans, Scoring(0.1))
    assert_close(got.double(), wanted, atol=1.5e-2, rtol=1e-2)


def test_each_number_of_fp8_is_what_torch_has(ops: ctypes.CDLL) -> None:
    """A query that sees one key gets its value."""
    codes = torch.arange(256, dtype=torch.uint8)
    cache = torch.zeros(1, 1, 2, 16, 256, dtype=torch.uint8)
    cache[0, 0, 1, 0] = codes
    one = torch.ones(1, dtype=torch.int32)
    spans = Spans(torch.tensor([0, 1], dtype=torch.int32), one, 0 * one[None], 1, 1)
    query = torch.zeros(1, 1, 256).bfloat16()
    got = paged_attention_panels(ops, query, to_panels(cache.view(FP8)), spans, Scoring(1.0))
    assert_close(got[0, 0], codes.view(FP8).bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("kv_heads, head_dim, block_size", [(2, 256, 16), (8, 64, 48)])
@pytest.mark.parametrize("scales", [KvScales(), KvScales(0.37, 3.0)], ids=str)
def test_rows_are_those_of_torch_to_the_bit(
    ops: ctypes.CDLL,
    kind: torch.dtype,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    scales: KvScales,
) -> None:
    """Each number of bf16 is stored: too large, too small, infinite, and none."""
    shape, tokens = HeadShape(1, kv_heads, head_dim), 2**15 // (kv_heads * head_dim)
    numbers = EVERY_BF16 if kind == FP8 else EVERY_BF16.nan_to_num(0, 0, 0)
    if kind == torch.int8:  # rows of all sizes, one of zeros among them
        numbers[:head_dim] = 0
    kv = numbers.view(2, tokens, kv_heads, head_dim).transpose(0, 1)
    qkv = torch.cat((torch.zeros(tokens, head_dim).bfloat16(), kv.reshape(tokens, -1)), 1)
    num_blocks = -(-tokens // block_size) + 1
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    width = head_dim + 4 * (kind == torch.int8)
    wanted = torch.zeros(num_blocks, kv_heads, 2, block_size, width, dtype=torch.uint8)
    for side, scale in enumerate((scales.key, scales.value)):
        rows = kept_as(kv[:, side], kind, scale)
        wanted[slots // block_size, :, side, slots % block_size] = rows
    places, by_ref = Places(None, slots), torch.zeros_like(wanted).view(kind)
    rows = key_rows(slots, by_ref)
    rotate_and_store_ref(qkv, None, places, shape, by_ref, rows, scales)
    assert torch.equal(by_ref.view(torch.uint8), wanted)
    panels = torch.zeros_like(wanted).view(kind)
    rotate_and_store_panels(ops, qkv.contiguous(), None, places, shape, panels, scales)
    got, of_torch = panels.view(torch.uint8), to_panels(wanted.view(kind)).view(torch.uint8)
    assert torch.equal(got, of_torch)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_of_int8_with_what_is_no_number_has_no_scale(ops: ctypes.CDLL, number: float) -> None:
    qkv = torch.ones(1, 3 * 64).bfloat16()
    qkv[0, 64 + 5] = qkv[0, 128 + 7] = number
    places, panels = Places(None, torch.tensor([3])), torch.zeros(1, 1, 2, 16, 68).to(torch.int8)
    rotate_and_store_panels(ops, qkv, None, places, HeadShape(1, 1, 64), panels)
    scales = panels.flatten(3)[0, 0, :, 64 * 16 :].contiguous().view(torch.float32)
    assert not scales[:, 3].isfinite().any() and scales.isfinite().sum() == 30


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("attention", [paged_attention_ref, paged_attention_tiled])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 80), (4, 4, 64)])
def test_torch_attends_to_what_the_cache_stands_for(
    attention, kind, window, dtype, tolerance, heads, kv_heads, head_dim
):
    query, cache, numbers, spans = make_kept(kind, MIXED, heads, kv_heads, head_dim, 10)
    scoring = Scoring(0.1, window)
    got = attention(query.to(dtype), cache, spans, scoring)
    wanted = expected(query, numbers, spans, scoring)
    assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("way", ["compiled", "ref", "tiled"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_layers_scales_multiply_what_the_cache_holds(
    ops: ctypes.CDLL, way: str, softcap: float | None
) -> None:
    query, cache, numbers, spans = make_kept(FP8, [*MIXED, (1, 2100)], 6, 2, 64, scale=0.37)
    sinks = torch.linspace(-4, 4, 6)
    scoring = Scoring(0.1, None, softcap, sinks, KvScales(0.37, 0.74))
    if way == "compiled":
        got = paged_attention_panels(ops, query, to_panels(cache), spans, scoring)
    else:
        attention = paged_attention_ref if way == "ref" else paged_attention_tiled
        got = attention(query.float(), cache, spans, scoring)
    numbers[:, :, 1] *= 2
    wanted = expected(query, numbers, spans, scoring)
    assert_close(got.double(), wanted, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_gpus_kernels_divide_by_a_layers_scales_and_multiply_again(splits: int) -> None:
    """In Triton's interpreter, where what is stored is torch's."""
    shape, scales, tokens = HeadShape(2, 1, 64), KvScales(0.37, 3.0), 40
    qkv = torch.randn(tokens, 4 * 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache = torch.zeros(3, 1, 2, 16, 64, dtype=torch.uint8).view(FP8)
    by_ref, slots = cache.clone(), torch.arange(tokens)
    query = rotate_and_store_triton(qkv, None, None, slots, shape, cache, scales)
    rows = key_rows(slots, by_ref)
    rotate_and_store_ref(qkv, None, Places(None, slots), shape, by_ref, rows, scales)
    assert torch.equal(cache.float(), by_ref.float())  # the interpreter loses a zero's sign
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    spans = Spans(ends, ends[1:], torch.arange(3, dtype=torch.int32)[None], tokens, tokens)
    scoring = Scoring(0.1, None, 2.0, None, scales)
    got = paged_attention_triton(query, cache, spans, scoring, splits=splits)
    numbers = cache.float() * torch.tensor([0.37, 3.0])[:, None, None]
    assert_close(got.double(), expected(query, numbers, spans, scoring), atol=2e-2, rtol=2e-2)
