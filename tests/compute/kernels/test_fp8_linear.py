"""Products in eight bits, against the same numbers widened, and against the whole weight."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tensors
from penstock.kernels.linear.quantise import quantise_fp8
from penstock.kernels.numbers.fp8 import quantise_rows_ref
from penstock.kernels.rows.activation import activate_ref
from penstock.worker.layers.products.fp8_linear import Fp8Linear
from penstock.worker.layers.products.product import Pass

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
    layer, pass_ = Fp8Linear(quantise_fp8(weight), bias, factor=0.5), Pass(deterministic)
    wanted = widened(x) @ widened(weight).t()
    wanted = 0.5 * (wanted if bias is None else wanted + bias)
    near = {"atol": 0.02 * float(wanted.abs().max()) if rows else 0, "rtol": 1e-2}
    got = layer(x, pass_)
    assert got.is_contiguous() and got.dtype == torch.bfloat16
    assert_close(got.double(), wanted, **near)
    assert layer.wide(x, pass_).dtype == torch.float32
    residual = randn(rows, out)
    assert_close(layer.add(x, residual.clone(), pass_).double(), residual + wanted, **near)
    whole = 0.5 * (x.double() @ weight.double().t() + (0 if bias is None else bias))
    if rows:
        error = ((got.double() - whole).norm() / whole.norm()).item()
        assert error < 0.06, "eight bits lose a few per cent"


def test_it_is_activated():
    x, weight = randn(4, 64), randn(32, 64)
    layer, pass_ = Fp8Linear(quantise_fp8(weight), None, "silu_mul"), Pass(False)
    wanted = activate_ref(layer(x, pass_), "silu_mul")
    assert_close(layer.activated(x, pass_), wanted, atol=0.05, rtol=0.02)


def test_a_row_has_the_same_bits_beside_others():
    x, layer = randn(90, 4096), Fp8Linear(quantise_fp8(randn(2048, 4096)), None)
    alike = Pass(deterministic=True)
    whole = layer(x, alike)
    assert all(torch.equal(layer(x[at : at + 1], alike)[0], whole[at]) for at in (0, 31, 32, 89))


def test_a_row_that_is_no_number_spoils_itself_alone():
    x, layer = randn(6, 64), Fp8Linear(quantise_fp8(randn(32, 64)), None)
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    assert layer(x, Pass(False)).isfinite().all(1).tolist() == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
