"""Products in eight bits, against the same numbers widened, and against the whole weight."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tensors
from penstock.kernels.numbers.fp8 import quantise_rows_ref
from penstock.kernels.rows.activation import activate_ref
from penstock.worker.layers.fp8_linear import Fp8Linear

randn = partial(tensors.randn, dtype=torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    numbers, scales = quantise_rows_ref(x)
    return numbers.double() * scales


@pytest.mark.parametrize("rows, out, wide", [(1, 48, 64), (5, 32, 320), (70, 40, 128), (0, 16, 16)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_product_is_that_of_its_rounded_sides(rows, out, wide, biased, deterministic):
    x, weight = 3 * randn(rows, wide), randn(out, wide) * torch.arange(1, out + 1)[:, None]
    bias = 100 * randn(out) if biased else None
    layer = Fp8Linear(weight, bias, deterministic, factor=0.5)
    wanted = widened(x) @ widened(weight).t()
    wanted = 0.5 * (wanted if bias is None else wanted + bias)
    near = {"atol": 0.02 * float(wanted.abs().max()) if rows else 0, "rtol": 1e-2}
    got = layer(x)
    assert got.is_contiguous() and got.dtype == torch.bfloat16
    assert_close(got.double(), wanted, **near)
    assert layer.wide(x).dtype == torch.float32
    residual = randn(rows, out)
    assert_close(layer.add(x, residual.clone()).double(), residual + wanted, **near)
    whole = 0.5 * (x.double() @ weight.double().t() + (0 if bias is None else bias))
    if rows:
        error = ((got.double() - whole).norm() / whole.norm()).item()
        assert error < 0.06, "eight bits lose a few per cent"


def test_it_is_activated():
    x, weight = randn(4, 64), randn(32, 64)
    layer = Fp8Linear(weight, None, False, "silu_mul")
    assert_close(layer.activated(x), activate_ref(layer(x), "silu_mul"), atol=0.05, rtol=0.02)


def test_a_row_has_the_same_bits_beside_others():
    x, layer = randn(90, 4096), Fp8Linear(randn(2048, 4096), None, deterministic=True)
    whole = layer(x)
    assert all(torch.equal(layer(x[at : at + 1])[0], whole[at]) for at in (0, 31, 32, 89))


def test_a_row_that_is_no_number_spoils_itself_alone():
    x, layer = randn(6, 64), Fp8Linear(randn(32, 64), None, deterministic=False)
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    assert layer(x).isfinite().all(1).tolist() == [True, True, False, True, False, True]
