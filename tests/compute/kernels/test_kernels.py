"""The small operations, each against torch or transformers, in a round shape and a weird one."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from judged import activated
from penstock.kernels.cache.store_kv import store_kv
from penstock.kernels.rows.activation import Activation, activate, activate_rowwise, num_parts
from penstock.kernels.rows.norm import NormWeights, add_normalised, normalise, normalise_ref
from penstock.kernels.rows.rotary import rotary
from penstock.worker.layers.arithmetic import AS_IT_IS
from penstock.worker.layers.latent_attention import HeadLinear
from penstock.worker.layers.linear import Weight, linear
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.rotary import RotaryTable
from tensors import randn

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("tokens, hidden", [(4, 128), (5, 123), (1, 576)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("kind", ["rms", "rms, one is added", "layer"])
def test_a_norm_equals_transformers(
    tokens: int, hidden: int, dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    x, residual = randn(tokens, hidden, dtype=dtype) + 1, randn(tokens, hidden, dtype=dtype)
    weight, bias = randn(hidden, dtype=dtype), randn(hidden + 1, dtype=dtype)[1:]
    theirs: Any = LlamaRMSNorm(hidden, 1e-5).to(dtype)
    norm = NormWeights(weight.float(), 1e-5)
    if kind == "layer":
        theirs = torch.nn.LayerNorm(hidden, 1e-5).to(dtype)
        theirs.bias.data = bias
        norm = NormWeights(weight.float(), 1e-5, bias.float(), centers=True)
    elif kind == "rms, one is added":
        theirs = Gemma2RMSNorm(hidden, 1e-5).to(dtype)
        norm = NormWeights(1 + weight.float(), 1e-5)
    theirs.weight.data = weight
    wanted, near = theirs(x).detach(), {"atol": tolerance, "rtol": tolerance}
    assert_close(normalise(x, norm), wanted, **near)
    assert_close(normalise_ref(x, norm), wanted, **near)
    assert_close(add_normalised(x, norm, residual.clone()), wanted + residual, **near)
    shift = None if norm.bias is None else norm.bias.to(dtype)
    narrow = NormWeights(norm.weight.to(dtype), 1e-5, shift, norm.centers)
    assert_close(normalise(x, narrow), wanted, **near)


def test_the_stride_of_a_dimension_of_one_says_nothing() -> None:
    """As a view of one head has it; else other rows would be read and written."""
    norm = NormWeights(randn(32), 1e-5)
    x = randn(7, 1, 32, dtype=torch.bfloat16).as_strided((7, 1, 32), (32, 16, 1))
    assert x.is_contiguous()
    assert_close(normalise(x, norm), normalise_ref(x, norm))


@pytest.mark.parametrize("tokens, heads, head_dim", [(4, 8, 64), (3, 5, 10)])
def test_rotary_equals_transformers(tokens: int, heads: int, head_dim: int) -> None:
    x, positions = randn(tokens, heads, head_dim), torch.tensor([7, 0, 40, 3][:tokens])
    inv_freq = 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(positions.float(), inv_freq).repeat(1, 2)[None]
    wanted, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], 1.5 * angles.cos(), 1.5 * angles.sin()
    )
    turn = RotaryTable(inv_freq, 1.5, torch.float32).rows(positions, 41)
    assert_close(rotary(x, turn.cos, turn.sin), wanted[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens, hidden", [(4, 64), (3, 37)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("act", [activate, activate_rowwise])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation_equals_transformers(
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    tolerance: float,
    act: Callable[[Tensor, Activation], Tensor],
    activation: Activation,
) -> None:
    x = 3 * randn(tokens, num_parts(activation) * hidden, dtype=dtype)
    assert_close(
        act(x, activation).double(), activated(x, activation), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("kv_heads, block_size, head_dim", [(2, 16, 64), (3, 5, 7)])
def test_every_key_and_value_lands_in_its_slot_and_nothing_else_changes(
    kv_heads: int, block_size: int, head_dim: int
) -> None:
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(0))[:9]
    qkv = randn(9, 3 * kv_heads, head_dim)
    key, value = qkv[:, :kv_heads], qkv[:, 2 * kv_heads :]
    cache = randn(6, kv_heads, 2, block_size, head_dim)
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        wanted[slot // block_size, :, 0, slot % block_size] = key[row]
        wanted[slot // block_size, :, 1, slot % block_size] = value[row]
    store_kv(key, value, cache, slots)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows, wide, out", [(1, 64, 32), (33, 100, 77), (64, 576, 960)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
def test_a_packed_product_equals_torch(
    deterministic: bool,
    biased: bool,
    rows: int,
    wide: int,
    out: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, weight = randn(rows, wide, dtype=dtype), randn(out, wide, dtype=dtype) / wide**0.5
    bias = randn(out, dtype=dtype) if biased else None
    got = linear(Weight.dense(weight), bias, AS_IT_IS)(x, Pass(deterministic))
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(got.double(), wanted, atol=2 * tolerance, rtol=tolerance)
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rowwise_operations_give_a_row_the_same_bits_alone(dtype: torch.dtype) -> None:
    """The ordinary ones do not in these shapes, where a thread's share ends amid a row."""
    for activation in get_args(Activation):
        x = randn(999, num_parts(activation) * 333, dtype=dtype)
        whole = activate_rowwise(x, activation)
        for i in range(999):
            assert torch.equal(activate_rowwise(x[i : i + 1], activation), whole[i : i + 1])
    x, weight = randn(70, 1536, dtype=dtype), randn(576, 1536, dtype=dtype)
    product, alike = linear(Weight.dense(weight), None, AS_IT_IS), Pass(deterministic=True)
    whole = product(x, alike)
    for i in range(70):
        assert torch.equal(product(x[i : i + 1], alike), whole[i : i + 1])
    heads = HeadLinear(randn(4, 64, 160, dtype=dtype))
    x = randn(70, 4, 64, dtype=dtype)
    whole = heads(x, alike)
    for i in range(70):
        assert torch.equal(heads(x[i : i + 1], alike), whole[i : i + 1])
