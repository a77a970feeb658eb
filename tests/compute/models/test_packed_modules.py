"""Modules as other programs packed them, against what these take their numbers for."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from safetensors import safe_open
from torch import Tensor

from packers import rounded, words
from paths import SUPPORT
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.folder.four_bits import four_bit_rows
from penstock.worker.models.folder.integers import packed_weight
from penstock.worker.models.folder.packed import PackedForm, packed_form

FILES = sorted((SUPPORT / "recorded" / "packed").glob("*.safetensors"))


class Module:
    """The tensors of one module, `m`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name.removeprefix("m.") in self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name.removeprefix("m.")]

    def place(self, name: str) -> str:
        return f"a.safetensors: tensor {name}"


def opened(path: Path) -> tuple[PackedForm, Module]:
    with safe_open(path, framework="pt") as file:
        fields = {"quantization_config": json.loads(file.metadata()["quantization_config"])}
        form = packed_form(fields)
        assert form is not None
        return form, Module({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_those_of_who_wrote_them(path: Path) -> None:
    form, module = opened(path)
    dense = module.tensors.pop("dense")
    shape = (dense.shape[0], dense.shape[1])
    weight = packed_weight("m", shape, form, module)
    if weight is None:
        rows = four_bit_rows("m", shape, module)
        assert rows is not None
    else:
        rows = weight.rows(slice(None), torch.float32)
    assert rows.dtype == torch.float32
    assert torch.equal(rows.to(dense.dtype), dense)
    assert dense.float().std() > 0.05
    assert (form.integers is None) == (weight is None)


def test_the_last_group_may_have_fewer_columns() -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
    groups = torch.arange(96) // 64
    numbers, scales, zeros = rounded(weight, 4, groups)
    tensors = {
        "qweight": words(numbers, 4).t().contiguous(),
        "qzeros": words(zeros.t() - 1, 4),
        "scales": scales.t().half().contiguous(),
    }
    config: dict[str, JsonValue] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    form = packed_form({"quantization_config": config})
    assert form is not None
    found = packed_weight("m", (16, 96), form, Module(tensors))
    assert found is not None
    wanted = (numbers - zeros[:, groups]) * scales[:, groups]
    assert torch.allclose(found.rows(slice(None), torch.float32), wanted, atol=1e-5)


def recorded(name: str) -> tuple[PackedForm, Module, tuple[int, int]]:
    form, module = opened(SUPPORT / "recorded" / "packed" / f"{name}.safetensors")
    rows, columns = module.tensors.pop("dense").shape
    return form, module, (rows, columns)


@pytest.mark.parametrize(
    "file, name, tensor, words",
    [
        ("gptq_4bit", "scales", torch.ones(3, 7), "scales has shape [3, 7], not [any, 32]"),
        ("gptq_4bit", "scales", torch.ones(3, 32), "3 groups for 256 columns, which they do not"),
        ("gptq_4bit", "scales", torch.ones(2, 32), "qzeros has shape [4, 4], not [2, 4]"),
        ("awq", "scales", torch.ones(0, 32), "scales has 0 groups for 256 columns"),
        ("gptq_4bit", "qweight", torch.ones(33, 32).int(), "qweight has 33 int32 for 256 numbers"),
        ("gptq_4bit", "qzeros", torch.ones(4, 5).int(), "qzeros has shape [4, 5], not [4, 4]"),
        (
            "gptq_4bit_by_activity",
            "g_idx",
            torch.zeros(256).int(),
            "g_idx does not give groups of 32",
        ),
        ("gptq_4bit_by_activity", "g_idx", torch.ones(256).int() * 9, "does not give groups of 32"),
        ("awq", "qweight", torch.ones(256, 5).int(), "qweight has shape [256, 5], not [256, 4]"),
        ("awq", "qzeros", None, "tensor m.qzeros is missing"),
        ("llm_int8", "SCB", torch.ones(31), "SCB has shape [31], not [32]"),
        ("llm_int8", "weight", torch.ones(32, 8).to(torch.int8), "weight has shape [32, 8]"),
        ("nf4", "weight.absmax", torch.ones(3), "does not fit the weight's numbers"),
        ("nf4", "weight", torch.ones(64, 1).to(torch.uint8), "does not fit the weight's numbers"),
        ("nf4", "weight.quant_map", torch.ones(4), "does not fit the weight's numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    file: str, name: str, tensor: Tensor | None, words: str
) -> None:
    form, module, shape = recorded(file)
    del module.tensors[name]
    module.tensors |= {} if tensor is None else {name: tensor}
    with pytest.raises(BrokenModel) as refusal:
        if packed_weight("m", shape, form, module) is None:
            four_bit_rows("m", shape, module)
    assert words in str(refusal.value)
