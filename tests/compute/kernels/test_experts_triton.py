"""Experts on a GPU against their reference, in the interpreter."""

from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from penstock.kernels.linear.experts import experts_ref
from penstock.kernels.linear.experts_triton import (
    LARGE_TILE,
    SMALL_TILE,
    ExpertsOnGpu,
    ProductTile,
    blocks_of,
    grouped_product,
)
from penstock.kernels.linear.panel_weight import PACKINGS
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.weight import Weight, stack
from penstock.kernels.numbers.fp8 import quantise_rows_ref
from penstock.kernels.rows.activation import Activation, activate_ref, num_parts
from tensors import randn

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def chosen_of(tokens: int, num_chosen: int, num_experts: int, most: int) -> Tensor:
    """Numbers below `most`, none twice in a row: the experts from there on are left alone."""
    generator = torch.Generator().manual_seed(tokens)
    assert most <= num_experts
    rows = [torch.randperm(most, generator=generator)[:num_chosen] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32)


@pytest.mark.parametrize("tokens, num_chosen, num_experts, most", [
    (1, 1, 1, 1), (1, 2, 8, 8), (7, 2, 8, 3), (40, 4, 5, 5), (100, 1, 64, 2), (16, 8, 9, 9),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_each_pair_is_in_one_block_of_its_expert(
    tokens: int, num_chosen: int, num_experts: int, most: int, rows: int
) -> None:
    chosen = chosen_of(tokens, num_chosen, num_experts, most)
    blocks = blocks_of(chosen, num_experts, rows)
    of_block = blocks.pairs.view(-1, rows)
    real = of_block < chosen.numel()
    assert sorted(of_block[real].tolist()) == list(range(chosen.numel()))
    for expert, pairs, is_real in zip(blocks.experts, of_block, real, strict=True):
        assert (int(expert) == num_experts) == (not is_real.any())
        assert (chosen.flatten()[pairs[is_real].long()] == expert).all()
        assert not (is_real[1:] > is_real[:-1]).any(), "what fills up comes last"


@pytest.mark.parametrize("tile", [SMALL_TILE, LARGE_TILE, ProductTile(16, 32, 32, 4, 3)])
@pytest.mark.parametrize("inner, outer", [(64, 96), (37, 50), (200, 130)])
@pytest.mark.parametrize("dtype, tolerance", TYPES)
def test_a_grouped_product(
    tile: ProductTile, inner: int, outer: int, dtype: torch.dtype, tolerance: float
) -> None:
    num_experts, num_chosen, tokens = 5, 2, 21
    x, weights = randn(tokens, inner, dtype=dtype), randn(num_experts, outer, inner, dtype=dtype)
    weights /= inner**0.5
    chosen = chosen_of(tokens, num_chosen, num_experts, 4)
    blocks = blocks_of(chosen, num_experts, tile.rows)
    found = grouped_product(x, Weight.dense(weights), blocks, tile, num_chosen)
    wanted = torch.einsum("ti,tcoi->tco", x.float(), weights.float()[chosen.long()])
    near = {"atol": tolerance, "rtol": tolerance}
    assert_close(found.float(), wanted.flatten(0, 1), **near)


@pytest.mark.parametrize(
    "activation, tokens, factor",
    [("silu_mul", 1, 1.0), ("silu_mul", 50, 1.0), *((name, 3, 0.25) for name in ACTIVATIONS)],
)
@pytest.mark.parametrize("dtype, tolerance", TYPES)
def test_a_mixture(
    activation: Activation, tokens: int, dtype: torch.dtype, tolerance: float, factor: float
) -> None:
    """Experts of one token have no biases."""
    hidden, width, num_experts, num_chosen = 48, 40, 6, 3
    up = randn(num_experts, num_parts(activation) * width, hidden, dtype=dtype) / hidden**0.5
    down = randn(num_experts, hidden, width, dtype=dtype) / width**0.5
    biases = [
        None if tokens == 1 else randn(*each.shape[:2], dtype=dtype) / 2 for each in (up, down)
    ]
    x, residual = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype)
    chosen = chosen_of(tokens, num_chosen, num_experts, 5)
    shares = randn(tokens, num_chosen).softmax(-1)

    def expert(number: int, rows: Tensor) -> Tensor:
        made = F.linear(rows, up[number], None if biases[0] is None else biases[0][number])
        of_down = None if biases[1] is None else biases[1][number]
        return F.linear(activate_ref(made, activation), down[number], of_down) * factor

    experts = [lambda rows, number=number: expert(number, rows) for number in range(num_experts)]
    wanted = residual + experts_ref(x, experts, chosen, shares)
    mixture = ExpertsOnGpu(Weight.dense(up), Weight.dense(down), activation, factor, *biases)
    found = mixture.add(x, chosen, shares, residual.clone())
    assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_eight_bits(tokens: int, dtype: torch.dtype) -> None:
    """Against the same rounded numbers, widened."""
    hidden, width, num_experts, num_chosen = 48, 40, 6, 3
    sizes = torch.arange(1, num_experts + 1)[:, None, None]
    up = sizes * randn(num_experts, 2 * width, hidden) / hidden**0.5
    down = randn(num_experts, hidden, width) / width**0.5
    x, residual = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype)
    chosen = chosen_of(tokens, num_chosen, num_experts, 3)
    shares = randn(tokens, num_chosen).softmax(-1)

    def widened(rows: Tensor) -> Tensor:
        numbers, scales = quantise_rows_ref(rows)
        return numbers.float() * scales

    def expert(number: int, rows: Tensor) -> Tensor:
        made = widened(rows) @ widened(up[number]).T
        activated = activate_ref(made.to(dtype), "silu_mul")
        return (widened(activated) @ widened(down[number]).T).to(dtype)

    experts = [lambda rows, number=number: expert(number, rows) for number in range(num_experts)]
    wanted = residual + experts_ref(x, experts, chosen, shares)
    packed_up, packed_down = (stack([*map(quantise_fp8, each)]) for each in (up, down))
    mixture = ExpertsOnGpu(packed_up, packed_down, "silu_mul")
    found = mixture.add(x, chosen, shares, residual.clone())
    error = ((found - wanted).float().norm() / wanted.float().norm()).item()
    most = 1e-5 if dtype == torch.float32 else 0.04  # of bf16 many go to the neighbour in fp8
    assert error < most
    whole = ExpertsOnGpu(Weight.dense(up.to(dtype)), Weight.dense(down.to(dtype)), "silu_mul")
    far = whole.add(x, chosen, shares, residual.clone()) - found
    assert 0.005 < (far.float().norm() / wanted.float().norm()).item() < 0.08


@pytest.mark.parametrize("name", ["int8", "int4_g64", "int4_g128"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_a_mixture_of_few_bits(name: str, tokens: int) -> None:
    """Of the numbers that the weights were rounded to. The last group of 128 is short.

    One token has a small tile, of fifty each expert has enough for a large one.
    """
    hidden, width, num_experts, num_chosen = 64, 192, 4, 3
    up, down = randn(num_experts, 2 * width, hidden), randn(num_experts, hidden, width) / 8
    quantised = partial(quantise, packing=PACKINGS[name])
    packed = [[*map(quantised, each.bfloat16())] for each in (up, down)]
    wide_up, wide_down = ([one.rows(slice(None)).float() for one in each] for each in packed)
    x, residual = randn(tokens, hidden) / 8, randn(tokens, hidden)
    chosen = chosen_of(tokens, num_chosen, num_experts, 3)
    shares = randn(tokens, num_chosen).softmax(-1)

    def expert(number: int, rows: Tensor) -> Tensor:
        return activate_ref(rows @ wide_up[number].T, "silu_mul") @ wide_down[number].T

    experts = [partial(expert, number) for number in range(num_experts)]
    wanted = residual + experts_ref(x, experts, chosen, shares)
    mixture = ExpertsOnGpu(stack(packed[0]), stack(packed[1]), "silu_mul")
    found = mixture.add(x, chosen, shares, residual.clone())
    assert_close(found, wanted, atol=2e-2, rtol=1e-2)


def test_a_row_has_the_same_bits_whatever_comes_with_it() -> None:
    hidden, width, num_experts = 200, 96, 3
    up, down = randn(num_experts, 2 * width, hidden), randn(num_experts, hidden, width)
    mixture = ExpertsOnGpu(Weight.dense(up), Weight.dense(down), "silu_mul")
    x, chosen = randn(100, hidden), chosen_of(100, 2, num_experts, 3)
    shares = randn(100, 2).softmax(-1)
    together = mixture.add(x, chosen, shares, torch.zeros_like(x), deterministic=True)
    for row in (slice(0, 1), slice(5, 8), slice(90, 100)):
        parts = x[row], chosen[row], shares[row], torch.zeros_like(x[row])
        alone = mixture.add(*parts, deterministic=True)
        assert torch.equal(alone, together[row])


def test_many_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, width, num_experts = 32, 32, 4
    up, down = randn(num_experts, 2 * width, hidden), randn(num_experts, hidden, width)
    mixture = ExpertsOnGpu(Weight.dense(up), Weight.dense(down), "silu_mul")
    x, chosen = randn(50, hidden), chosen_of(50, 2, num_experts, 4)
    shares = randn(50, 2).softmax(-1)
    whole = mixture.add(x, chosen, shares, torch.zeros_like(x), deterministic=True)
    monkeypatch.setattr("penstock.kernels.linear.experts_triton._TOKENS", 16)
    parts = mixture.add(x, chosen, shares, torch.zeros_like(x), deterministic=True)
    assert torch.equal(whole, parts)
