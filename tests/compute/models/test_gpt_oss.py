"""Experts that a layer has in one tensor for all, and gpt-oss, which is published so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
from families import logprobs_of, prompts
from passes import Passes
from penstock.worker.models.folder.errors import ModelError, UnsupportedField
from penstock.worker.models.native.loading import load_decoder

TOLERANCE = 1e-4
EXPERTS = "model.layers.{}.mlp.experts.{}"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_gates_and_what_they_multiply_are_clamped(tmp_path: Path) -> None:
    """Of weights so large that most of them are."""
    families.save("gpt_oss", tmp_path)
    names = [EXPERTS.format(layer, "gate_up_proj") for layer in range(4)]
    rewrite(tmp_path, lambda tensors: tensors | {name: 20 * tensors[name] for name in names})
    wanted = logprobs_of(tmp_path, prompts())
    for (seq, at), row in Passes(load_decoder(tmp_path), prompts()).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("field, value", [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_other_limits_are_refused_by_name(field: str, value: float, tmp_path: Path) -> None:
    families.save("gpt_oss", tmp_path, **{field: value})
    with pytest.raises(UnsupportedField, match=f"{field} is {value}"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("gate_up_proj", lambda each: each[:7], "of expert 7 is not there: it has 7 parts"),
        ("gate_up_proj", lambda each: each[:0], "of expert 0 is not there: it has 0 parts"),
        ("gate_up_proj", lambda each: torch.ones(()), "of expert 0 is not there: it has 0 parts"),
        ("down_proj_bias", lambda each: torch.cat((each, each)), "unexpected tensor"),
        ("gate_up_proj", lambda each: each.mT.contiguous(), "has shape [64, 192]"),
        ("gate_up_proj_bias", lambda each: each[:, :-1].contiguous(), "has shape [191]"),
        ("down_proj", lambda each: each[:, :, 0].contiguous(), "has shape [96]"),
        ("down_proj", lambda each: each[..., None], "has shape [96, 1, 64]"),
    ],
)
def test_a_tensor_of_all_experts_of_another_shape_is_named(
    name: str, change: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    families.save("gpt_oss", tmp_path)
    stored = EXPERTS.format(1, name)
    rewrite(tmp_path, lambda tensors: tensors | {stored: change(tensors[stored])})
    with pytest.raises(ModelError) as refusal:
        load_decoder(tmp_path)
    message = str(refusal.value)
    assert words in message and stored in message and "model.safetensors" in message
    assert "\n" not in message


def test_a_tensor_of_all_experts_may_be_missing(tmp_path: Path) -> None:
    families.save("gpt_oss", tmp_path)
    stored = EXPERTS.format(2, "down_proj_bias")
    rewrite(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if name != stored})
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.experts\.0\.down_proj\.bias is missing"):
        load_decoder(tmp_path)
