"""Experts that a layer has in one tensor for all, and gpt-oss, which is published so, in MXFP4."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import families
from families import Played, logprobs_of, prompts
from passes import Passes
from penstock.kernels.linear.panel_weight import PanelWeight, panel_ops
from penstock.worker.layers.arithmetic import AS_IT_IS, Arithmetic
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import ModelError, UnsupportedField
from penstock.worker.models.folder.weights import SafetensorsWeights
from penstock.worker.models.native.config import read_config
from penstock.worker.models.native.loading import load_decoder, plan_decoder

TOLERANCE = 1e-4
EXPERTS = "model.layers.{}.mlp.experts.{}"
# The fields of gpt-oss-20b's config.json, of which sizes are less: 2,880 twice, 24 layers, 64 heads
# over 8, 32 experts, 201,088 tokens, and 4,096 positions.
PUBLISHED: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 160,
    "initial_context_length": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 2048,
    "model_type": "gpt_oss",
    "num_attention_heads": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 20,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": families.VOCAB,
}
SIZES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_mxfp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Round as the standard of microscaling formats has it: [.., columns] -> blocks and scales."""
    groups = weights.float().contiguous().numpy().reshape(*weights.shape[:-1], -1, 32)
    most = np.maximum(np.abs(groups).max(-1), 1e-30)
    exponents = np.floor(np.log2(most)).astype(int) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - SIZES).argmin(-1)
    codes = (nearest | np.where(scaled < 0, 8, 0)).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    blocks = np.ascontiguousarray(blocks)
    return torch.from_numpy(blocks), torch.from_numpy((exponents + 127).astype(np.uint8))


def publish(folder: Path, **fields: object) -> Path:
    """Write a folder as gpt-oss-20b is published, of random weights that reach the clamps."""
    folder.mkdir(exist_ok=True)
    config = PUBLISHED | fields
    (folder / "config.json").write_text(json.dumps(config))
    plain = {name: config[name] for name in config if name != "quantization_config"}
    torch.manual_seed(7)
    model = GptOssForCausalLM(GptOssConfig(**plain)).float()
    families.draw(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16().contiguous()
            continue
        loud = tensor * (8 if "gate_up" in name else 1)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = in_mxfp4(loud.mT)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def judge(folder: Path) -> GptOssForCausalLM:
    """Return transformers' module in float32, of the numbers that it makes of the folder's."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    model.set_experts_implementation("eager")
    return model.train(False)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("gpt-oss"))


@torch.inference_mode()
def rows_of(folder: Path, sequences: list[list[int]]) -> list[Tensor]:
    model = judge(folder)
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]
    return [each.log_softmax(-1) for each in logits]


def test_the_published_form_has_the_texts_of_transformers(published: Path) -> None:
    """Greedy ones, over slices, prefix hits and preemption; numbers are widened to float32."""
    played = Played(published)
    assert played.engine.runner.model.config.family == "gpt_oss"  # type: ignore[attr-defined]
    assert played.stats.num_preemptions and played.stats.cached_tokens
    model = judge(published)
    for prompt, sequence in zip(prompts(), played.sequences, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        assert made[0].tolist() == sequence
    wanted = rows_of(published, prompts())
    for (seq, at), row in (
        Passes(load_decoder(published, "float32"), prompts()).whole().logits.items()
    ):
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < TOLERANCE


def test_it_is_multiplied_as_it_is_on_a_cpu(
    published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In bf16, where rows are rounded to 8 bits and an expert chosen by a hair may be another."""
    with caplog.at_level(logging.INFO):
        decoder = load_decoder(published)
    assert decoder.dtype == torch.bfloat16
    assert "integers (mxfp4) are multiplied as they are, by rows rounded to 8 bits" in caplog.text
    wanted = rows_of(published, prompts())
    whole, apart = (Passes(decoder, prompts(), seed) for seed in (1, 2))
    off = [
        float((row.log_softmax(-1) - wanted[seq][at]).abs().mean())
        for (seq, at), row in whole.in_slices(30).logits.items()
    ]
    assert sorted(off)[len(off) // 2] < 0.1
    for place, row in apart.in_slices(7).logits.items():
        assert torch.equal(row, whole.logits[place])


def test_a_gpu_has_it_widened(
    published: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels take integers of eight bits with one scale a row. Triton's interpreter is one."""
    monkeypatch.setattr("penstock.kernels.numbers.device.TRITON_DEVICES", {"cpu"})
    with caplog.at_level(logging.INFO):
        decoder = load_decoder(published)
    assert "64 modules are widened, model.layers.0.mlp.experts.0.gate_up_proj" in caplog.text
    assert decoder.is_capturable, "experts with biases are multiplied together"
    ids = prompts()[:1]
    (wanted,) = rows_of(published, ids)
    off = [
        float((row.log_softmax(-1) - wanted[at]).abs().mean())
        for (_, at), row in Passes(decoder, ids).whole().logits.items()
    ]
    assert sorted(off)[len(off) // 2] < 0.1


def test_deterministic_tokens_of_eight_bits_are_what_they_are_alone(published: Path) -> None:
    decoder = load_decoder(published, arithmetic=Arithmetic(deterministic=True))
    whole = Passes(decoder, prompts(), 1).whole()
    for place, row in Passes(decoder, prompts()).alone([4]).logits.items():
        assert torch.equal(row, whole.logits[place])


@pytest.mark.parametrize("name, shape", [("gate_up_proj", (192, 160)), ("down_proj", (160, 96))])
def test_numbers_are_those_of_transformers(
    name: str, shape: tuple[int, int], published: Path
) -> None:
    """To the bit, of all bytes and scales that there are."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(published / "model.safetensors")
    stored = EXPERTS.format(1, name)
    blocks, scales = tensors[f"{stored}_blocks"], tensors[f"{stored}_scales"]
    blocks = torch.randint(0, 256, blocks.shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 255, scales.shape, generator=generator, dtype=torch.uint8)
    assert len(blocks.unique()) == 256 and {0, 254} <= set(scales.flatten().tolist())
    folder = published.parent / f"any {name}"
    folder.mkdir()
    packed = {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
    save_file(tensors | packed, folder / "model.safetensors", {"format": "pt"})
    form = read_config(published).packed_form
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    weights = SafetensorsWeights(folder, packed_form=form)
    target = torch.empty(shape)
    for number in range(8):
        module = EXPERTS.format(1, f"{number}.{name}")
        weights.fill(target, f"{module}.weight")
        assert torch.equal(target, wanted[number].mT)
        weight = weights.product({module: shape[0]}, shape[1], torch.bfloat16, torch.device("cpu"))
        assert weight.numbers.dtype == torch.int8 and weight.group == 32
        ops = panel_ops(weight, AS_IT_IS.packing)
        assert ops is not None
        rows = PanelWeight(ops, weight, None).rows(torch.arange(shape[0]))
        assert torch.equal(rows, wanted[number].mT.bfloat16())


def test_the_dense_form_of_the_same_numbers_is_the_same_model(
    published: Path, tmp_path: Path
) -> None:
    judge(published).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("quantization_config", None)
    path.write_text(json.dumps(fields))
    dense, packed = load_decoder(tmp_path), load_decoder(published, "float32")
    assert dense.dtype == torch.float32
    wanted = Passes(dense, prompts()).whole().logits
    for place, row in Passes(packed, prompts()).whole().logits.items():
        assert torch.equal(row, wanted[place])


def test_a_plan_counts_experts_alone_as_packed(published: Path) -> None:
    plan = plan_decoder(ModelSpec(published))
    assert plan.integers == (8, 32) and plan.dtype == torch.bfloat16
    assert len(plan.products) == 4 * 8 * 2 and all(".experts." in name for name in plan.products)
    assert plan_decoder(ModelSpec(published, dtype="float32")).integers is None


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing beside"),
        ("down_proj_blocks", None, "down_proj.weight is missing"),
        ("gate_up_proj_scales", lambda each: each[..., :-1], "uint8 [192, 4], not uint8 [192, 5]"),
        ("gate_up_proj_blocks", lambda each: each[..., :8], "uint8 [192, 5, 8], not"),
        ("gate_up_proj_blocks", lambda each: each[:7], "of expert 7 is not there: it has 7 parts"),
        ("down_proj_scales", lambda each: each.int(), "is int32 [160, 3], not uint8"),
        ("down_proj_scales", lambda each: each | 255, "has a scale of 255, which is no number"),
        ("down_proj_blocks", lambda each: torch.cat((each, each)), "unexpected tensor"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_does_not_fit_is_named(
    name: str,
    change: Callable[[Tensor], Tensor] | None,
    words: str,
    dtype: Literal["float32", "bfloat16"],
    published: Path,
    tmp_path: Path,
) -> None:
    tensors, stored = load_file(published / "model.safetensors"), EXPERTS.format(1, name)
    tensor = tensors.pop(stored)
    more = {} if change is None else {stored: change(tensor).contiguous()}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ModelError) as refusal:
        load_decoder(tmp_path, dtype)
    message = str(refusal.value)
    assert words in message and "\n" not in message and "layers.1.mlp.experts" in message


def test_widths_that_are_no_groups_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, intermediate_size=96)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 80}))
    with pytest.raises(ModelError, match="uint8"):
        load_decoder(tmp_path)


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
