"""The compiled operations against torch in float64, in round shapes and weird ones.

Every way of a processor to multiply is compiled and run; what this one lacks is emulated.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_attention import DECODES, MIXED, expected, make, row_alone, scorings
from torch import Tensor
from torch.testing import assert_close

import tensors
from judged import activated
from odd_ways import ways_of
from penstock.kernels.attention.paged_attention_panels import paged_attention_panels, to_panels
from penstock.kernels.attention.spans import HeadShape, Scoring, Spans
from penstock.kernels.cache.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    rotate_and_store_panels,
    rotate_and_store_ref,
)
from penstock.kernels.cache.store_kv import key_rows
from penstock.kernels.linear.choose import ExpertChoice, choose_compiled, choose_ref
from penstock.kernels.linear.experts import Expert, PanelExperts, experts_ref
from penstock.kernels.linear.panel_weight import PACKINGS, PanelWeight
from penstock.kernels.linear.weight import Weight
from penstock.kernels.rows.activation import Activation, num_parts
from penstock.kernels.rows.norm import NormWeights, normalise_compiled, normalise_ref
from penstock.kernels.sampling.draw import LOG2_E
from penstock.kernels.sampling.sample import (
    NO_TOKEN,
    WAY,
    SampleRef,
    Ways,
    mass_compiled,
    mass_ref,
    sample_compiled,
)
from penstock.kernels.whole.panel_layers import LayerParts, PanelLayers
from penstock.worker.layers.mlp import MLP
from penstock.worker.layers.products.panel_linear import PanelLinear
from penstock.worker.layers.products.product import Pass

PASS = Pass(deterministic=False)
randn = partial(tensors.randn, dtype=torch.bfloat16)


# rows, out_features, in_features
SHAPES = [(1, 16, 32), (2, 100, 64), (5, 576, 576), (17, 34, 1536), (70, 200, 4096), (300, 30, 64)]
SHAPES += [(140, 40, 4096)]  # several runs of rows, and pieces of columns, where tiles multiply


@pytest.mark.parametrize("rows, out, wide", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_torch(
    ops: ctypes.CDLL, rows: int, out: int, wide: int, biased: bool
) -> None:
    x, weight = randn(rows, wide), randn(out, wide, seed=1) / wide**0.5
    bias = randn(out) if biased else None
    exact = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    product = PanelLinear(PanelWeight(ops, Weight.dense(weight), bias))
    assert_close(product.wide(x, PASS).double(), exact, atol=2e-5, rtol=2e-5)
    assert torch.equal(product(x, PASS), product.wide(x, PASS).bfloat16())
    residual = randn(rows, out, seed=2)
    added = (product.wide(x, PASS) + residual).bfloat16()
    assert torch.equal(product.add(x, residual, PASS), added) and torch.equal(residual, added)
    halved = PanelLinear(PanelWeight(ops, Weight.dense(weight), bias, factor=0.5))
    assert torch.equal(halved.wide(x, PASS), product.wide(x, PASS) / 2)
    assert torch.equal(halved(x, PASS), product.wide(x, PASS).div(2).bfloat16())
    for activation in get_args(Activation):
        panels = PanelWeight(ops, Weight.dense(weight), bias, activation=activation, factor=2.0)
        made = PanelLinear(panels).activated(x, PASS)
        wanted = activated(2 * exact, activation)
        assert_close(made.double(), wanted, atol=1e-2, rtol=1e-2)
    index = torch.tensor([out - 1, 0, out // 2])
    assert torch.equal(product.panels.rows(index), weight[index])


@pytest.mark.parametrize("name", ["int8", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("rows, out, wide", [(1, 16, 128), (5, 100, 192), (70, 33, 704)])
def test_quantised_products_equal_torch(
    ops: ctypes.CDLL, name: str, rows: int, out: int, wide: int
) -> None:
    """Of the numbers that the weight was rounded to, and the rows too. The last group is short."""
    x, weight, bias = randn(rows, wide), randn(out, wide, seed=1) / wide**0.5, randn(out)
    weight[0] = 0
    product = PanelLinear(PanelWeight(ops, Weight.dense(weight), bias, PACKINGS[name]))
    rounded = product.panels.rows(torch.arange(out))
    group = PACKINGS[name].group or wide
    padded = F.pad(weight.abs(), (0, -wide % group)).view(out, -1, group)
    most = padded.amax(-1).repeat_interleave(group, 1)[:, :wide]
    steps = 127 if name == "int8" else 8
    assert ((rounded - weight).abs() <= 0.01 * most + most / steps).all()
    assert ((rounded - weight).abs().mean(-1) <= 0.3 * most.amax(-1) / steps).all()
    scale = x.abs().amax(-1, keepdim=True).double() / 127
    eighth = (x.double() / scale).round() * scale
    exact = F.linear(eighth, rounded.double(), bias.double())
    assert_close(product.wide(x, PASS).double(), exact, atol=1e-2, rtol=1e-2)
    alone = torch.cat([product.wide(row, PASS) for row in x.split(1)])
    assert torch.equal(alone, product.wide(x, PASS))


@pytest.mark.parametrize("bits, group", [(8, 16), (8, 64), (8, 0), (4, 32), (4, 64), (4, 128)])
@pytest.mark.parametrize("rows, out, wide", [(1, 16, 128), (5, 100, 384), (70, 33, 640)])
@pytest.mark.parametrize("more", ["", "order", "mins, order"])
def test_packed_products_equal_torch(
    ops: ctypes.CDLL, bits: int, group: int, rows: int, out: int, wide: int, more: str
) -> None:
    """A checkpoint's numbers stay what they are, whatever their groups."""
    weight = packed_weight(2 * out, wide, bits, group, more)
    eighths = (32 * randn(rows, wide)).round().clamp(-127, 127)
    eighths[:, -1] = 127
    x, bias = eighths / 32, randn(2 * out)
    product = PanelLinear(PanelWeight(ops, weight, bias))
    index = torch.arange(2 * out)
    assert torch.equal(product.panels.rows(index), weight.rows(index))
    exact = F.linear(x.double(), weight.rows(index, torch.float32).double(), bias.double())
    wide_rows = product.wide(x, PASS)
    assert_close(wide_rows.double(), exact, atol=1e-3, rtol=1e-3)
    alone = torch.cat([product.wide(row, PASS) for row in x.split(1)])
    assert torch.equal(alone, wide_rows)
    panels = PanelWeight(ops, weight, bias, activation="silu_mul")
    wanted = activated(exact, "silu_mul")
    assert_close(PanelLinear(panels).activated(x, PASS).double(), wanted, atol=2e-2, rtol=2e-2)


def packed_weight(out: int, wide: int, bits: int, group: int, more: str) -> Weight:
    """Return numbers of all kinds with scales that bf16 has not."""
    groups = wide // (group or wide)
    generator = torch.Generator().manual_seed(bits + group)
    numbers = torch.randint(0, 2**bits, (out, wide), generator=generator)
    scales = torch.rand(out, groups, generator=generator) / 2**bits / wide**0.5
    mins = (
        scales * torch.randint(0, 2**bits, scales.shape, generator=generator)
        if "mins" in more
        else None
    )
    order = torch.randperm(wide, generator=generator) if "order" in more else None
    if bits == 4:
        return Weight.of_nibbles(numbers.to(torch.uint8), scales, group or wide, mins, order)
    return Weight((numbers - 128).to(torch.int8), scales, group or wide, wide, mins, order)


@pytest.mark.parametrize("name", ["int8", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_overflow_nowhere(ops: ctypes.CDLL, name: str, sign: int) -> None:
    weight = torch.full((16, 256), 1 if name == "int8" else 0.875).bfloat16()
    weight[:, ::64] = -1  # in 4 bits -8, so that the others are 7
    x = torch.full((6, 256), sign * 127).bfloat16()
    got = PanelLinear(PanelWeight(ops, Weight.dense(weight), None, PACKINGS[name])).wide(x, PASS)
    assert_close(got, F.linear(x.float(), weight.float()), atol=0, rtol=5e-3)


@pytest.mark.parametrize("rows, out, wide", SHAPES)
def test_a_products_row_has_the_same_bits_alone(
    ops: ctypes.CDLL, rows: int, out: int, wide: int
) -> None:
    x, weight = randn(rows, wide), randn(out, wide, seed=1)
    product = PanelLinear(PanelWeight(ops, Weight.dense(weight), None))
    alone = torch.cat([product.wide(row, PASS) for row in x.split(1)])
    assert torch.equal(alone, product.wide(x, PASS))


LONG = [(1, 1030), (1, 2049), (3, 1025), (50, 1050)]


@pytest.mark.parametrize(
    "lengths, window",
    [
        (DECODES, None),
        (DECODES, 64),
        (MIXED, None),
        (MIXED, 1),
        (MIXED, 20),
        (LONG, None),
        (LONG, 1024),
    ],
)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size",
    [(9, 3, 64, 16), (4, 4, 32, 48), (6, 1, 96, 32), (1, 1, 256, 16)],
)
def test_attention_equals_torch(
    ops: ctypes.CDLL,
    lengths: list[tuple[int, int]],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    query, cache, spans = make(lengths, heads, kv_heads, head_dim, block_size, torch.bfloat16)
    wanted = expected(query, cache, spans, Scoring(0.1, window))
    panels = to_panels(cache)
    got = paged_attention_panels(ops, query, panels, spans, Scoring(0.1, window))
    assert_close(got.double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("lengths", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize("scoring", [Scoring(0.1), Scoring(0.1, 20), *scorings(6)], ids=str)
def test_attention_of_a_row_has_the_same_bits_alone(
    ops: ctypes.CDLL, lengths: list[tuple[int, int]], scoring: Scoring
) -> None:
    query, cache, spans = make(lengths, 6, 2, 64, dtype=torch.bfloat16)
    panels = to_panels(cache)
    whole = paged_attention_panels(ops, query, panels, spans, scoring)
    assert_close(whole.double(), expected(query, cache, spans, scoring), atol=1e-2, rtol=1e-2)
    starts = spans.query_start.tolist()
    for seq, (length, context) in enumerate(lengths):
        for row in range(0, length, 3):
            alone = row_alone(spans, seq, context - length + row + 1)
            at = slice(starts[seq] + row, starts[seq] + row + 1)
            got = paged_attention_panels(ops, query[at], panels, alone, scoring)
            assert torch.equal(got, whole[at])


@pytest.mark.parametrize(
    "common, contexts",
    [
        (64, [65, 66, 80, 128]),
        (512, [544, 608, 513, 512]),
        (1024, [1024, 1025, 1100, 1300]),
        (1536, [1600, 1537, 2047, 1536]),
        (3072, [3100, 3200, 3300, 3072]),
    ],
)
@pytest.mark.parametrize("heads, kv_heads, block_size", [(9, 3, 16), (4, 4, 48)])
def test_sequences_with_a_prefix_in_common_get_the_bits_that_each_gets_alone(
    ops: ctypes.CDLL,
    common: int,
    contexts: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
) -> None:
    """A prefix is read once for several; others, longer and shorter, stand between them."""
    lengths = [(1, context) for context in contexts * 4]
    lengths[7:7] = [(1, 70), (3, 700), (1, 90)]
    query, cache, spans = make(lengths, heads, kv_heads, 64, block_size, torch.bfloat16)
    for row, (_, context) in enumerate(lengths):
        if context >= common:
            blocks = (common - 64 * (row == 3)) // block_size
            spans.block_tables[row, :blocks] = spans.block_tables[0, :blocks]
    panels, scoring = to_panels(cache), Scoring(0.1, None, 4.0, torch.linspace(-4, 4, heads))
    got = paged_attention_panels(ops, query, panels, spans, scoring)
    assert_close(got.double(), expected(query, cache, spans, scoring), atol=1e-2, rtol=1e-2)
    starts = spans.query_start.tolist()
    for row, (length, context) in enumerate(lengths):
        at = slice(starts[row], starts[row + 1])
        alone = Spans(
            torch.tensor([0, length], dtype=torch.int32),
            spans.context_lens[row : row + 1],
            spans.block_tables[row : row + 1],
            length,
            context,
        )
        one = paged_attention_panels(ops, query[at], panels, alone, scoring)
        assert torch.equal(one, got[at])


def test_what_nobody_sees_may_be_any_number(ops: ctypes.CDLL) -> None:
    """Slots after a sequence's last key, and blocks of others."""
    query, cache, spans = make([(1, 21), (5, 37)], 4, 2, 64, dtype=torch.bfloat16)
    wanted = paged_attention_panels(ops, query, to_panels(cache), spans, Scoring(0.1))
    tables = spans.block_tables
    cache[tables[0, 1], :, :, 5:] = 3e38
    cache[tables[1, 2], :, :, 5:] = -3e38
    held = {*tables[0, :2].tolist(), *tables[1, :3].tolist()}
    cache[[block for block in range(len(cache)) if block not in held]] = torch.nan
    got = paged_attention_panels(ops, query, to_panels(cache), spans, Scoring(0.1))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", [(6, 2, 64, 16), (5, 5, 96, 48)])
@pytest.mark.parametrize(
    "normed, turns", [("", True), ("heads", True), ("rows", True), ("", False)]
)
def test_rotation_and_store_equal_the_reference(
    ops: ctypes.CDLL,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    normed: str,
    turns: bool,
) -> None:
    tokens, shape = 37, HeadShape(heads, kv_heads, head_dim)
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim)
    angles = 5 * randn(tokens, head_dim // 2).float()
    cos, sin = angles.cos(), angles.sin()
    turn = Rotation(torch.cat((cos, cos), 1).bfloat16(), torch.cat((-sin, sin), 1).bfloat16())
    places = Places(
        turn if turns else None,
        torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(1))[:tokens],
    )
    norms = _head_norms(normed, shape)
    cache = randn(6, kv_heads, 2, block_size, head_dim)
    panels = to_panels(cache)
    rows = key_rows(places.slot_mapping, cache)
    wanted = rotate_and_store_ref(qkv, norms, places, shape, cache, rows)
    got = rotate_and_store_panels(ops, qkv, norms, places, shape, panels)
    near = {"atol": 3e-2, "rtol": 2e-2} if normed or turns else {"atol": 0, "rtol": 0}
    assert_close(got, wanted, **near)
    assert_close(panels, to_panels(cache), **near)


def _norm(width: int, seed: int = 0, *, layer: bool = False) -> NormWeights:
    bias = randn(width, seed=seed + 5).float() if layer else None
    return NormWeights(randn(width, seed=seed).float(), 1e-5, bias, layer)


def _head_norms(kind: str, shape: HeadShape) -> HeadNorms | None:
    if not kind:
        return None
    heads = (shape.num_heads, shape.num_kv_heads) if kind == "rows" else (1, 1)
    query, key = (_norm(each * shape.head_dim, seed) for seed, each in enumerate(heads))
    return HeadNorms(query, key, kind == "rows")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a layer's parts stand; norms by their places: attention in, out, feed-forward in, out."""

    norms: tuple[bool, bool, bool, bool] = (True, False, True, False)
    head_norm: str = ""
    activation: Activation = "silu_mul"
    is_parallel: bool = False
    is_layer_norm: bool = False
    tables: tuple[int | None, int | None] = (0, 0)
    factor: float = 1.0


@pytest.mark.parametrize(
    "name, arrangement",
    [
        *[(name, Arrangement()) for name in PACKINGS],
        ("bf16", Arrangement(head_norm="heads", tables=(1, None))),
        ("bf16", Arrangement((True,) * 4, "heads", "gelu_mul", tables=(0, 1))),
        ("bf16", Arrangement((False, True, False, True), "rows", factor=0.25)),
        ("bf16", Arrangement((True, False, False, False), is_parallel=True, is_layer_norm=True)),
        ("int8", Arrangement((False, True, False, True), "rows", "gelu", is_layer_norm=True)),
        ("int8", Arrangement((True,) * 4, activation="relu2")),
    ],
)
def test_layers_in_one_call_have_the_bits_of_their_operations(
    ops: ctypes.CDLL, name: str, arrangement: Arrangement
) -> None:
    """Between them rows lie as products read them; one by one they take and give plain rows."""
    heads, kv_heads, head_dim, size, inner = 4, 2, 32, 128, 192
    shape = HeadShape(heads, kv_heads, head_dim)
    _, cache, spans = make([(1, 1030), (21, 40), (1, 5)], heads, kv_heads, head_dim)
    slots = torch.cat(
        [
            table[torch.arange(context - rows, context) // 16] * 16
            + torch.arange(context - rows, context) % 16
            for table, (rows, context) in zip(
                spans.block_tables.long(), [(1, 1030), (21, 40), (1, 5)], strict=True
            )
        ]
    )
    rotations = [Rotation(*randn(2, 23, head_dim, seed=seed)) for seed in (1, 2)]

    def product(
        out: int, wide: int, seed: int, activation: Activation | None = None, factor: float = 1.0
    ) -> PanelWeight:
        parts = num_parts(activation) if activation else 1
        weight, bias = randn(parts * out, wide, seed=seed) / 8, randn(parts * out, seed=seed)
        return PanelWeight(ops, Weight.dense(weight), bias, PACKINGS[name], activation, factor)

    def norm(place: int, seed: int) -> NormWeights | None:
        layer = arrangement.is_layer_norm
        return _norm(size, seed + place, layer=layer) if arrangement.norms[place] else None

    scoring = Scoring(0.2, 12, 3.0, torch.linspace(-4, 4, shape.num_heads))
    layers = [
        LayerParts(
            norm(0, seed),
            product((heads + 2 * kv_heads) * head_dim, size, seed),
            _head_norms(arrangement.head_norm, shape),
            table,
            scoring,
            product(size, heads * head_dim, seed, factor=arrangement.factor),
            norm(1, seed),
            norm(2, seed),
            product(inner, size, seed, arrangement.activation),
            product(size, inner, seed, factor=arrangement.factor),
            norm(3, seed),
            arrangement.is_parallel,
        )
        for seed, table in zip((10, 20), arrangement.tables, strict=True)
    ]
    caches = [to_panels(cache.bfloat16()) for _ in layers]
    alone = [each.clone() for each in caches]
    hidden = randn(23, size)
    wanted = hidden.clone()
    got = PanelLayers(layers, shape)(ops, hidden, caches, rotations, slots, spans)

    def normed(x: Tensor, norm: NormWeights | None) -> Tensor:
        return normalise_compiled(ops, x, norm, torch.empty_like(x)) if norm else x

    def added(panels: PanelWeight, x: Tensor, norm: NormWeights | None) -> None:
        product = PanelLinear(panels)
        if norm is None:
            product.add(x, wanted, PASS)
        else:
            normalise_compiled(ops, product(x, PASS), norm, wanted, adds=True)

    for layer, panels in zip(layers, alone, strict=True):
        rows = normed(wanted, layer.attention_in)
        places = Places(None if layer.table is None else rotations[layer.table], slots)
        query = rotate_and_store_panels(
            ops, PanelLinear(layer.qkv)(rows, PASS), layer.head_norms, places, shape, panels
        )
        attended = paged_attention_panels(ops, query, panels, spans, scoring)
        added(layer.output, attended.view(23, -1), layer.attention_out)
        rows = rows if layer.is_parallel else normed(wanted, layer.mlp_in)
        added(layer.down, PanelLinear(layer.gate_up).activated(rows, PASS), layer.mlp_out)
    assert torch.equal(got, wanted) and wanted.isfinite().all()
    for one, other in zip(caches, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "choice",
    [
        ExpertChoice(64, 8),
        ExpertChoice(7, 2, normalises=False),
        ExpertChoice(8, 3, "sigmoid", (4, 2), 2, factor=2.5),
        ExpertChoice(12, 3, "softmax", (3, 1), 1, normalises=False, factor=16.0),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_as_torch_chooses(
    ops: ctypes.CDLL, choice: ExpertChoice, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(choice.num_experts)
    logits = 2 * torch.randn(33, choice.num_experts, generator=generator)  # no two are equal
    bias = randn(choice.num_experts).float().abs() if biased else None
    logits[5] = torch.nan
    got, shares = choose_compiled(ops, logits, choice, bias)
    assert len(set(got[5].tolist())) == choice.num_chosen  # each has memory of its own
    wanted, of_wanted = choose_ref(logits, choice, bias)
    whole = torch.arange(33) != 5
    got, shares, wanted, of_wanted = (x[whole] for x in (got, shares, wanted, of_wanted))
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)
    order, of_order = got.argsort(-1), wanted.argsort(-1)
    assert_close(shares.gather(1, order), of_wanted.gather(1, of_order), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("tokens, num, num_chosen", [(1, 7, 2), (37, 5, 3), (260, 3, 3)])
def test_experts_equal_one_after_the_other(
    ops: ctypes.CDLL,
    name: str,
    tokens: int,
    num: int,
    num_chosen: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of seven experts some have no row; of three each has all, and a bias after its last product.

    Each expert's biases are its own. The most rows come in two calls.
    """
    monkeypatch.setattr("penstock.kernels.linear.experts._ROWS", 256)
    size, inner, activation = 128, 192, "clamped_mul" if num == 3 else "silu_mul"
    packing = PACKINGS[name]
    up = [
        PanelWeight(
            ops,
            Weight.dense(randn(2 * inner, size, seed=each) / 8),
            randn(2 * inner, seed=each),
            packing,
            activation,
        )
        for each in range(num)
    ]
    down = [
        PanelWeight(
            ops,
            Weight.dense(randn(size, inner, seed=each) / 8),
            randn(size, seed=each) if num == 3 else None,
            packing,
        )
        for each in range(num)
    ]
    x, residual = randn(tokens, size), randn(tokens, size, seed=1)
    generator = torch.Generator().manual_seed(tokens)
    ranks = torch.rand(tokens, num, generator=generator)
    chosen = ranks.topk(num_chosen, -1).indices.to(torch.int32)
    shares = torch.rand(tokens, num_chosen, generator=generator)

    def expert(number: int) -> Expert:
        mlp = MLP(PanelLinear(up[number]), PanelLinear(down[number]))
        return lambda rows: mlp(rows, PASS)

    wanted = experts_ref(x, [expert(each) for each in range(num)], chosen, shares)
    together = PanelExperts(up, down)
    got = together(x, chosen, shares)
    assert_close(got, wanted, atol=1e-2, rtol=1e-2)
    assert wanted.abs().max() > 1
    added = together.add(x, chosen, shares, residual.clone())
    assert_close(added, wanted + residual, atol=3e-2, rtol=1e-2)
    for row in (0, tokens - 1):
        at = slice(row, row + 1)
        assert torch.equal(together(x[at], chosen[at], shares[at]), got[at])


def test_threads_that_store_neighbours_lose_nothing(ops: ctypes.CDLL) -> None:
    """A prompt from an odd place on: two threads store tokens whose values share words."""
    shape, tokens = HeadShape(2, 2, 64), 320
    qkv = randn(tokens, 6 * 64)
    turn = Rotation(torch.ones(tokens, 64).bfloat16(), torch.zeros(tokens, 64).bfloat16())
    places = Places(turn, torch.arange(3, 3 + tokens))
    empty = torch.zeros(21, 2, 2, 16, 64).bfloat16()
    rows = key_rows(places.slot_mapping, empty)
    wanted = empty.clone()
    rotate_and_store_ref(qkv, None, places, shape, wanted, rows)
    wanted = to_panels(wanted)
    for _ in range(200):
        panels = empty.clone()
        rotate_and_store_panels(ops, qkv, None, places, shape, panels)
        assert torch.equal(panels, wanted)


@pytest.mark.parametrize("rows, hidden", [(1, 64), (3, 123), (300, 576), (2, 20_001)])
@pytest.mark.parametrize("layer", [False, True])
def test_a_norm_equals_the_reference(ops: ctypes.CDLL, rows: int, hidden: int, layer: bool) -> None:
    x, norm, residual = randn(rows, hidden) + 1, _norm(hidden, layer=layer), randn(rows, hidden)
    got, wanted = torch.empty_like(x), normalise_ref(x.float(), norm)
    normalise_compiled(ops, x, norm, got)
    assert_close(got.float(), wanted, atol=1e-5, rtol=1e-2)
    normalise_compiled(ops, x, norm, got.copy_(residual), adds=True)
    assert_close(got.float(), wanted + residual, atol=2e-2, rtol=1e-2)


def test_numbers_that_are_none_stay_so(ops: ctypes.CDLL) -> None:
    x, weight = randn(3, 64), randn(32, 64)
    x[1, 7] = torch.nan
    for name in ("bf16", "int8"):
        got = PanelLinear(PanelWeight(ops, Weight.dense(weight), None, PACKINGS[name]))(x, PASS)
        assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def assert_sampled_alike(
    ops: ctypes.CDLL, ways: Ways, logits: Tensor, masks: Tensor | None = None
) -> None:
    """As the reference samples all together, and compiled each row alone."""
    rows, vocab = logits.shape
    positions = np.arange(rows) * 1009
    masses, is_finite = mass_compiled(ops, logits), logits.amax(-1).isfinite()
    assert torch.equal(masses[is_finite], mass_ref(logits)[is_finite])
    once, twice = logits.clone(), logits.clone()
    wanted = SampleRef(ways, vocab, logits.device)(once, positions, masks)
    got = sample_compiled(ops, ways, twice, positions, masks)
    assert got.tolist() == wanted.tolist()
    assert torch.equal(once.nan_to_num(7.0), twice.nan_to_num(7.0))
    assert torch.equal(got == NO_TOKEN, ~once.amax(-1).isfinite())
    alone = [
        sample_compiled(
            ops,
            ways[row : row + 1],
            logits[row : row + 1].clone(),
            positions[row : row + 1],
            None if masks is None else masks[row : row + 1],
        )
        for row in range(rows)
    ]
    assert torch.equal(torch.cat(alone), got)


@pytest.mark.parametrize(
    "rows, vocab", [(20, 1), (40, 15), (40, 17), (90, 64), (60, 1001), (9, 50257), (3, 262144)]
)
@pytest.mark.parametrize("spread", [0.001, 3.0, 40.0])
def test_sampled_tokens_equal_the_reference(
    ops: ctypes.CDLL, rows: int, vocab: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[1::3] = (logits[1::3] / spread * 4).round() / 4  # ties
    for row, odd in zip(range(2, rows, 7), [math.nan, math.inf, -math.inf] * 5, strict=False):
        logits[row, row * 37 % vocab] = odd
    words = (rows, -(-vocab // 32))
    masks = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, generator=generator)
    for seed, given_masks in enumerate((None, masks, masks & 1, masks * 0)):
        assert_sampled_alike(ops, ways_of(seed + vocab, rows), logits, given_masks)


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 1.0])
LOGIT = st.floats(width=32, min_value=-50, max_value=50) | ODD


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    some=st.lists(LOGIT, min_size=1, max_size=8),
    copies=st.integers(1, 40),
)
def test_any_logits_are_sampled_as_the_reference_does(
    ops: ctypes.CDLL, seed: int, some: list[float], copies: int
) -> None:
    logits = torch.tensor(some).repeat(4, copies)
    logits[2:] = logits[2:].flip(-1)
    logits[3] = logits[3].nan_to_num(0, 5, -5)
    assert_sampled_alike(ops, ways_of(seed, 4), logits)


def test_what_is_just_as_likely_as_min_p_asks_is_kept(ops: ctypes.CDLL) -> None:
    logits = torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))
    logits[1::2] += 30
    ways = np.zeros(3000, WAY)
    ways["temperature"], ways["top_p"], ways["seed"] = 1, 1, np.arange(3000)
    power = (logits.amin(-1) - logits.amax(-1)) * LOG2_E
    ways["min_p"] = power.double().exp2().numpy()
    assert_sampled_alike(ops, ways, logits)
    drawn = sample_compiled(ops, ways, logits, np.zeros(3000, np.int64), None)
    assert (drawn == logits.argmin(-1)).sum() > 800


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.1), (299, 0.5), (0, 0.9)])
def test_equal_logits_are_all_drawn_or_none(ops: ctypes.CDLL, top_k: int, top_p: float) -> None:
    logits = torch.full((3000, 500), -20.0)
    logits[:, 100:400] = 2.0
    ways = np.zeros(3000, WAY)
    ways["temperature"], ways["top_k"], ways["top_p"] = 0.7, top_k, top_p
    ways["seed"] = np.arange(3000)
    drawn = sample_compiled(ops, ways, logits, np.zeros(3000, np.int64), None)
    assert set(drawn.tolist()) == set(range(100, 400))
