"""Products with weights of 8 and 4 bits on a GPU: how they are rounded, and in the interpreter."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import tensors
from penstock.kernels.linear.panel_weight import PACKINGS, PanelWeight, panel_ops
from penstock.kernels.linear.quantise import quantise, quantise_fp8
from penstock.kernels.linear.quantised_triton import quantised_product
from penstock.kernels.numbers.device import TRITON_DEVICES
from penstock.kernels.rows.activation import activate_ref
from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.layers.choices import Quantization
from penstock.worker.layers.linear import Weight, linear
from penstock.worker.layers.products.product import Pass
from penstock.worker.layers.products.quantised_linear import QuantisedLinear

NAMES = ["int8", "int4_g64", "int4_g128"]
# Of the last group of 128 only half is there.
SHAPES = [(1, 16, 128), (5, 100, 192), (70, 33, 704)]
randn = partial(tensors.randn, dtype=torch.bfloat16)


def weight_of(out: int, wide: int) -> Tensor:
    weight = randn(out, wide, seed=1) / wide**0.5
    weight[0] = 0
    weight[1] = -(weight[1].abs())  # whose largest number has a sign
    return weight


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("_, out, wide", SHAPES)
def test_a_weight_stands_for_the_same_numbers_as_on_a_cpu(
    name: str, _: int, out: int, wide: int
) -> None:
    weight, packing = weight_of(out, wide), PACKINGS[name]
    ops = panel_ops(Weight.dense(weight), packing)
    assert ops is not None
    index = torch.arange(out)
    wanted = PanelWeight(ops, Weight.dense(weight), None, packing).rows(index)
    found = quantise(weight, packing)
    assert torch.equal(found.rows(index), wanted)
    assert found.scales is not None
    num_bytes = found.numbers.nbytes + found.scales.nbytes
    assert num_bytes <= weight.nbytes * (packing.bits / 16) * 1.4 + 2 * out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, out, wide", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product(name: str, rows: int, out: int, wide: int, biased: bool) -> None:
    x, weight = randn(rows, wide), quantise(weight_of(out, wide), PACKINGS[name])
    bias = randn(out) if biased else None
    numbers = weight.rows(torch.arange(out)).double()
    exact = F.linear(x.double(), numbers, bias.double() if bias is not None else None) / 4
    found = torch.full((rows, out), torch.nan)
    quantised_product(x, weight, bias, found, factor=0.25)
    assert_close(found.double(), exact, atol=4e-3, rtol=4e-3)
    residual = randn(rows, out, seed=2)
    wanted = residual.double() + exact
    quantised_product(x, weight, bias, residual, factor=0.25, adds=True)
    assert_close(residual.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.fixture
def interpret() -> object:
    TRITON_DEVICES.add("cpu")
    yield
    TRITON_DEVICES.discard("cpu")


@pytest.mark.usefixtures("interpret")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rows, deterministic", [(1, False), (40, False), (130, False), (1, True), (40, True)]
)
def test_a_layer_computes_few_rows_and_many(name: str, rows: int, deterministic: bool) -> None:
    out, wide = 48, 192
    x, bias = randn(rows, wide), randn(out)
    weight = weight_of(out, wide)
    packed, pass_ = quantise(weight, PACKINGS[name]), Pass(deterministic)
    rounded = packed.rows(torch.arange(out))
    exact = F.linear(x.float(), rounded.float(), bias.float()) * 0.5
    near = {"atol": 3e-2, "rtol": 3e-2}

    layer = QuantisedLinear(packed, bias, "silu_mul", factor=0.5)
    assert_close(layer(x, pass_).float(), exact, **near)
    assert layer.wide(x, pass_).dtype == torch.float32
    assert_close(layer.wide(x, pass_), exact, **near)
    residual = randn(rows, out, seed=3)
    wanted = residual.float() + exact
    assert_close(layer.add(x, residual, pass_).float(), wanted, **near)
    made = layer.activated(x, pass_)
    assert_close(made.float(), activate_ref(exact, "silu_mul"), **near)
    index = torch.tensor([out - 1, 0, 7])
    assert torch.equal(packed.rows(index), rounded[index])


@pytest.mark.usefixtures("interpret")
@pytest.mark.parametrize("name", [*NAMES, "fp8"])
@pytest.mark.parametrize("others", [None, "int8", "fp8"])
def test_a_packed_weight_keeps_its_bits(name: Quantization, others: Quantization | None) -> None:
    """Whatever bits a dense weight would get, and in whatever order its rows are."""
    x, weight, pass_ = randn(5, 192), weight_of(48, 192), Pass(deterministic=True)
    packed = quantise_fp8(weight) if name == "fp8" else quantise(weight, PACKINGS[name])
    dense = linear(Weight.dense(weight), None, Arithmetic(quantization=name))
    made = linear(packed, None, Arithmetic(quantization=others))(x, pass_)
    assert torch.equal(made, dense(x, pass_))
    order = torch.arange(48).flip(0)
    assert torch.equal(linear(packed[order], None, AS_IT_IS)(x, pass_), made[:, order])


@pytest.mark.usefixtures("interpret")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_whatever_comes_with_it(name: str) -> None:
    """They are as many as are few to nothing else."""
    layer = QuantisedLinear(quantise(weight_of(48, 320), PACKINGS[name]), None)
    x, pass_ = randn(150, 320), Pass(deterministic=True)
    together = layer.wide(x, pass_)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 150)):
        assert torch.equal(layer.wide(x[rows], pass_), together[rows])
