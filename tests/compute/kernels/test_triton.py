"""The small Triton kernels against their references, in the interpreter."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from odd_ways import ways_of
from penstock.kernels.attention.spans import HeadShape
from penstock.kernels.cache.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    rotate_and_store_ref,
)
from penstock.kernels.cache.rotate_and_store_triton import rotate_and_store_triton
from penstock.kernels.cache.store_kv import key_rows
from penstock.kernels.cache.store_latents import store_latents_ref
from penstock.kernels.cache.store_latents_triton import store_latents_triton
from penstock.kernels.numbers.fp8 import FP8, quantise_rows_ref
from penstock.kernels.numbers.fp8_triton import quantise_rows_triton
from penstock.kernels.rows.activation import Activation, activate_ref
from penstock.kernels.rows.activation_triton import activate_triton
from penstock.kernels.rows.norm import NormWeights, normalise_ref
from penstock.kernels.rows.norm_triton import normalise_triton
from penstock.kernels.sampling.draw import LOG2_E
from penstock.kernels.sampling.sample import SampleOnGpu, SampleRef
from tensors import randn

NEAR = {"atol": 0.001, "rtol": 1 / 16}  # numbers in fp8
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize("shape", [(4, 128), (3, 123), (2, 5, 64), (1, 576)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("centers, shifted", [(False, False), (False, True), (True, True)])
def test_a_norm(shape, dtype, tolerance, centers, shifted):
    x, residual = randn(*shape, dtype=dtype) + 1, randn(*shape, dtype=dtype) - 1
    bias = randn(shape[-1]) if shifted else None
    norm = NormWeights(1 + randn(shape[-1] + 1)[1:], 1e-3, bias, centers)
    wanted = normalise_ref(x, norm)

    def normalised(out: Tensor, **how: bool) -> Tensor:
        return normalise_triton(x, norm.weight, bias, norm.eps, centers, out, **how)

    near = {"atol": tolerance, "rtol": tolerance}
    assert_close(normalised(torch.full_like(x, torch.nan)), wanted, **near)
    assert_close(normalised(residual.clone(), adds=True), residual + wanted, **near)


@pytest.mark.parametrize("tokens, hidden", [(4, 64), (3, 37), (2, 1500)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation(tokens, hidden, dtype, tolerance, activation: Activation):
    x = 3 * randn(tokens, hidden * (2 if activation.endswith("_mul") else 1), dtype=dtype)
    near = {"atol": tolerance, "rtol": tolerance}
    assert_close(activate_triton(x, activation), activate_ref(x, activation), **near)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size",
    [
        (8, 2, 64, 16),
        (5, 5, 80, 16),
        (3, 1, 96, 10),
        (40, 8, 128, 16),
        (2, 1, 256, 32),
        (1, 1, 6, 4),
    ],
)
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("normalises, rotates", [(True, True), (False, True), (True, False)])
def test_rotating_and_storing(
    heads, kv_heads, head_dim, block_size, dtype, tolerance, normalises, rotates
):
    shape, tokens, blocks = HeadShape(heads, kv_heads, head_dim), 5, 4
    qkv = randn(tokens, sum(shape.rows), dtype=dtype)
    turn = randn(2, tokens, head_dim, dtype=dtype)
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:tokens]
    norms = HeadNorms(NormWeights(randn(head_dim) + 1, 1e-3), NormWeights(randn(head_dim), 1e-3))
    places = Places(Rotation(turn[0], turn[1]) if rotates else None, slots)
    empty = randn(blocks, kv_heads, 2, block_size, head_dim, dtype=dtype)
    wanted_cache, got_cache = empty.clone(), empty.clone()
    wanted = rotate_and_store_ref(
        qkv, norms if normalises else None, places, shape, wanted_cache, key_rows(slots, empty)
    )
    weights = (norms.query.weight, norms.key.weight, 1e-3) if normalises else None
    rotation = (turn[0], turn[1]) if rotates else None
    got = rotate_and_store_triton(qkv, weights, rotation, slots, shape, got_cache)
    assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert_close(got_cache, wanted_cache, atol=tolerance, rtol=tolerance)

    slots = slots.clone()
    slots[2] = -1
    kept = rotate_and_store_triton(qkv, weights, rotation, slots, shape, empty)
    assert_close(kept, got, atol=0, rtol=0)
    changed = (empty != got_cache).any(-1)
    assert changed.sum() <= 2 * kv_heads, "only the token without a slot was left out"
    assert changed.any()


@pytest.mark.parametrize(
    "heads, still, latent, turned, block_size", [(5, 12, 40, 8, 16), (16, 0, 64, 64, 10)]
)
@pytest.mark.parametrize("dtype, tolerance", TYPES)
def test_storing_latents(heads, still, latent, turned, block_size, dtype, tolerance):
    """From slices of wider rows, as products give them."""
    tokens, blocks = 5, 4
    turning = randn(tokens, heads, still + turned, dtype=dtype)[..., still:]
    latents = randn(tokens, 7 + latent + turned, dtype=dtype)[:, 7:]
    turn = randn(2, tokens, turned, dtype=dtype)
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:tokens]
    norm, rotation = NormWeights(randn(latent) + 1, 1e-3), Rotation(turn[0], turn[1])
    before, empty = randn(1 + blocks, 1, 1, block_size, latent + turned, dtype=dtype).split(
        (1, blocks)
    )
    kept_before = before.clone()
    wanted_cache, got_cache = empty.clone(), empty.clone()
    rows = key_rows(slots, empty)
    wanted = store_latents_ref(turning, latents, norm, rotation, wanted_cache, rows)
    got = store_latents_triton(turning, latents, norm, rotation, slots, got_cache)
    assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert_close(got_cache, wanted_cache, atol=tolerance, rtol=tolerance)

    slots = slots.clone()
    slots[2] = -1
    kept = store_latents_triton(turning, latents, norm, rotation, slots, empty)
    assert_close(kept, got, atol=0, rtol=0)
    assert (empty != got_cache).any(-1).sum() == 1, "only the token without a slot was left out"
    assert torch.equal(before, kept_before), "nothing is stored in front of the cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", [(1, 16), (5, 300), (3, 1024)])
def test_rows_in_eight_bits(rows, width, dtype):
    x = randn(rows, width, dtype=dtype) * 10.0 ** torch.arange(rows)[:, None].to(dtype)
    x[-1, 3:] = 0
    got, scales = quantise_rows_triton(x)
    wanted, of_wanted = quantise_rows_ref(x)
    assert_close(scales, of_wanted)
    assert torch.equal(got.float(), wanted.float())
    assert_close(
        got.float() * scales, x.float(), atol=float(x.abs().max()) / 448 / 512, rtol=1 / 16
    )
    assert got.float().abs().amax(1).tolist() == [448.0] * rows
    nothing, of_nothing = quantise_rows_triton(x * 0)
    assert not nothing.float().any() and (of_nothing == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_in_eight_bits_is_there(dtype):
    """What is too large becomes the largest."""
    shape, slots = HeadShape(3, 2, 16), torch.tensor([5, 0, 17])
    qkv = 100 * randn(3, sum(shape.rows), dtype=dtype)
    qkv[1, 60], qkv[2, -1], qkv[0, -3] = 449, torch.inf, -1000
    places, cache = Places(None, slots), torch.zeros(2, 2, 2, 16, 16).to(FP8)
    kept = cache.clone()
    rotate_and_store_ref(qkv, None, places, shape, kept, key_rows(slots, kept))
    rotate_and_store_triton(qkv, None, None, slots, shape, cache)
    assert torch.equal(cache.float(), kept.float())
    assert_close(kept[1, :, 1, 1].flatten().float(), qkv[2, -32:].float().clamp(-448, 448), **NEAR)

    latents, cache = (100 * randn(3, 40)).to(FP8).to(dtype), torch.zeros(2, 1, 1, 16, 40).to(FP8)
    turning, norm, kept = latents[:, None, :8], NormWeights(1e9 * randn(32), 1e-5), cache.clone()
    rotation = Rotation(torch.ones(3, 8), torch.zeros(3, 8))
    store_latents_ref(turning, latents, norm, rotation, kept, key_rows(slots, kept))
    store_latents_triton(turning, latents, norm, rotation, slots, cache)
    assert torch.equal(cache.float(), kept.float())
    assert torch.equal(kept[0, 0, 0, 5, 32:].to(dtype), latents[0, 32:])
    assert (kept[0, 0, 0, 5, :32].float().abs() == 448).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, vocab, spread", [(5, 1, 3.0), (24, 15, 0.001), (24, 130, 40.0), (12, 1001, 3.0)]
)
def test_sampled_tokens(rows, vocab, spread):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[1::3] = (logits[1::3] / spread * 4).round() / 4  # ties, and zeros of both signs
    for row, odd in zip(range(2, rows, 7), [math.nan, math.inf, -math.inf] * 5, strict=False):
        logits[row, row * 37 % vocab] = odd
    words = (rows, -(-vocab // 32))
    masks = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, generator=generator)
    for seed, given_masks in enumerate((None, masks)):
        ways, positions = ways_of(seed + vocab, rows), np.arange(rows) * 1009
        wanted = SampleRef(ways, vocab, logits.device)(logits.clone(), positions, given_masks)
        got = SampleOnGpu(ways, vocab, logits.device)(logits.clone(), positions, given_masks)
        assert got.tolist() == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.1), (9, 0.5)])
def test_equal_logits_are_all_drawn_or_none(top_k, top_p):
    logits = torch.full((40, 20), -20.0)
    logits[:, 5:10] = 2.0
    ways = np.zeros(40, ways_of(0, 1).dtype)
    ways["temperature"], ways["top_k"], ways["top_p"] = 0.7, top_k, top_p
    ways["seed"] = np.arange(40)
    drawn = SampleOnGpu(ways, 20, logits.device)(logits, np.zeros(40, np.int64), None)
    assert set(drawn.tolist()) == set(range(5, 10))


@pytest.mark.slow
@pytest.mark.parametrize("top_p, kept", [(0.5, 1), (0.75, 2), (0.875, 3), (0.876, 5)])
def test_what_weighs_just_as_much_as_top_p_is_enough(top_p, kept):
    """Logits whose weights are whole parts of a power of two, as LOG2_E is their temperature."""
    ways = np.zeros(64, ways_of(0, 1).dtype)
    ways["temperature"], ways["top_p"], ways["seed"] = LOG2_E, top_p, np.arange(64)
    logits = torch.tensor([0.0, -1.0, -2.0, -3.0, -3.0]).repeat(64, 1)
    for sample in SampleRef, SampleOnGpu:
        drawn = sample(ways, 5, logits.device)(logits.clone(), np.zeros(64, np.int64), None)
        assert set(drawn.tolist()) == set(range(kept))


def test_both_zeros_are_one_logit():
    ways = np.zeros(12, ways_of(0, 1).dtype)
    ways["temperature"], ways["top_k"], ways["top_p"], ways["seed"] = 1, 1, 1, np.arange(12)
    logits = torch.tensor([0.0, -0.0, -9.0]).repeat(12, 1)
    drawn = SampleOnGpu(ways, 3, logits.device)(logits, np.zeros(12, np.int64), None)
    assert set(drawn.tolist()) == {0, 1}
