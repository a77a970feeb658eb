"""The small Triton kernels against their references, in the interpreter."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from penstock.kernels.activation import Activation, activate_ref
from penstock.kernels.activation_triton import activate_triton
from penstock.kernels.norm import NormWeights, normalise_ref
from penstock.kernels.norm_triton import normalise_triton
from penstock.kernels.rotate_and_store import (
    HeadNorms,
    Places,
    Rotation,
    rotate_and_store_ref,
)
from penstock.kernels.rotate_and_store_triton import rotate_and_store_triton
from penstock.kernels.spans import HeadShape
from penstock.kernels.store_kv import key_rows

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


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
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul", "gelu", "relu2"])
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
