"""Checkpoints of few bits as others write them: our decoder of each against transformers'."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import families
from families import Played, logprobs_of, prompts
from passes import Passes
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import BrokenModel, ModelError
from penstock.worker.models.folder.float8 import widened
from penstock.worker.models.folder.packed import PackedForm, packed_form
from penstock.worker.models.native.loading import load_decoder, plan_decoder

TOLERANCE = 1e-4
FP8 = torch.float8_e4m3fn
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# As DeepSeek publishes V3, and Qwen its FP8 models.
NAMES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe")


def pack(
    folder: Path, config: dict[str, object], pair: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    """Write the weights of a folder's products anew, each as the tensors that `pair` makes."""
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if name.endswith("proj.weight") and "vision" not in name:
            module = name.removesuffix("weight")
            tensors |= {f"{module}{end}": tensor for end, tensor in pair(weight).items()}
        else:
            tensors[name] = weight
    save_file(tensors, file, {"format": "pt"})
    fields = json.loads(path.read_text()) | {"quantization_config": config}
    path.write_text(json.dumps(fields))


def in_blocks(weight: Tensor, size: int = 128) -> dict[str, Tensor]:
    """Round a weight as DeepSeek's conversion does: the largest of a block becomes 448."""
    numbers = torch.empty(weight.shape, dtype=FP8)
    scales = torch.empty(-(-weight.shape[0] // size), -(-weight.shape[1] // size))
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            block = (
                slice(row * size, row * size + size),
                slice(column * size, column * size + size),
            )
            scales[row, column] = weight[block].abs().max() / 448
            numbers[block] = (weight[block] / scales[row, column]).to(FP8)
    return {"weight": numbers, "weight_scale_inv": scales}


def of_all(weight: Tensor) -> dict[str, Tensor]:
    """Round a weight with one scale, beside that of its input (static activations)."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(FP8),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.02),
    }


@pytest.mark.parametrize("name", NAMES)
def test_blocks_equal_transformers(name: str, tmp_path: Path) -> None:
    """Which widens them too, without a GPU."""
    families.save(name, tmp_path, dtype="float32")
    pack(tmp_path, BLOCKS, in_blocks)
    decoder = load_decoder(tmp_path)
    assert decoder.config.packed_form == PackedForm("fp8", (128, 128))
    wanted = logprobs_of(tmp_path, prompts())
    for (seq, at), row in Passes(decoder, prompts()).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < TOLERANCE


def test_several_blocks_and_a_part_of_one(tmp_path: Path) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    packed = in_blocks(weight)
    wide = widened(packed["weight"], packed["weight_scale_inv"], PackedForm("fp8", (128, 128)), "w")
    for row, column in ((0, 0), (127, 127), (128, 127), (299, 199), (130, 0)):
        scale = packed["weight_scale_inv"][row // 128, column // 128]
        assert wide[row, column] == packed["weight"][row, column].float() * scale
    assert float((wide - weight).abs().max()) < 0.2


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_the_text_of_a_model_that_sees(name: str, tmp_path: Path) -> None:
    """Its tower stays as it is."""
    families.save(name, tmp_path, dtype="float32")
    skipped = {
        "modules_to_not_convert": ["visual", "vision_tower", "multi_modal_projector", "lm_head"]
    }
    pack(tmp_path, BLOCKS | skipped, in_blocks)
    decoder = load_decoder(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith("weight_scale_inv")]:
        scale, weight = tensors.pop(key), key.removesuffix("_scale_inv")
        tensors[weight] = tensors[weight].float() * scale
    save_file(tensors, file, {"format": "pt"})
    dense = load_decoder(tmp_path)
    rows, wanted = (Passes(each, prompts()).whole().logits for each in (decoder, dense))
    assert all(torch.equal(rows[place], wanted[place]) for place in wanted)


def test_deepseeks_layer_for_later_tokens_is_left_unread(tmp_path: Path) -> None:
    """As it is published: one layer more than the configuration counts, packed as the others."""
    families.save("deepseek_v3", tmp_path, dtype="float32")
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    fields = json.loads(path.read_text())
    fields.pop("num_mtp_layers", None)
    path.write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    tensors, first = load_file(file), fields["num_hidden_layers"]
    more = {
        name.replace(f"layers.{first - 1}.", f"layers.{first}."): tensor.clone()
        for name, tensor in tensors.items()
        if f"layers.{first - 1}." in name
    }
    more[f"model.layers.{first}.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | more, file, {"format": "pt"})
    pack(tmp_path, BLOCKS, in_blocks)
    load_decoder(tmp_path)


def test_a_method_is_found_in_the_texts_configuration(tmp_path: Path) -> None:
    """Where Kimi K2.5 has it."""
    families.save("mistral3", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"]["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="quant_method is 'hqq'"):
        load_decoder(tmp_path)


def test_a_plan_needs_no_type_in_the_configuration(tmp_path: Path) -> None:
    families.save("qwen3", tmp_path)
    pack(tmp_path, BLOCKS, in_blocks)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: fields[name] for name in fields if name != "dtype"}))
    packed = {name: tensor for name, tensor in load_file(file).items() if tensor.dtype == FP8}
    rest = {name: tensor for name, tensor in load_file(file).items() if name not in packed}
    save_file(rest, tmp_path / "model-2.safetensors")
    save_file(packed, tmp_path / "model-1.safetensors")
    file.unlink()
    weight_map = dict.fromkeys(packed, "model-1.safetensors")
    weight_map |= dict.fromkeys(rest, "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert plan_decoder(ModelSpec(tmp_path)).dtype == torch.bfloat16
    assert load_decoder(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_what_compressed_tensors_writes(strategy: str, tmp_path: Path) -> None:
    families.save("qwen3", tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="float-quantized")
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None):
            most = module.weight.abs().amax(1 if strategy == "channel" else (0, 1))
            module.weight_scale.data.copy_((most / 448).view(module.weight_scale.shape))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(tmp_path / "packed")
    folder = tmp_path / "packed"
    dtypes = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert FP8 in dtypes
    decoder = load_decoder(folder, "float32")
    wanted = logprobs_of(folder, prompts())
    for (seq, at), row in Passes(decoder, prompts()).whole().logits.items():
        assert float((row.log_softmax(-1) - wanted[seq][at]).abs().max()) < 0.05


def test_the_blocks_of_compressed_tensors_are_those_of_its_group() -> None:
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 64]}
    rows = {"type": "float", "num_bits": 8, "strategy": "channel", "block_structure": None}
    groups = {"group_0": {"weights": weights}, "group_1": {"weights": rows}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    form = packed_form({"quantization_config": config})  # type: ignore[dict-item]
    assert form == PackedForm("compressed-tensors", (128, 64))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ],
)
def test_one_scale_for_all(config: dict[str, object], tmp_path: Path) -> None:
    families.save("llama", tmp_path, dtype="float32")
    dense = load_decoder(tmp_path)
    pack(tmp_path, config, of_all)
    decoder = load_decoder(tmp_path)
    rows, wanted = (Passes(each, prompts()).whole().logits for each in (decoder, dense))
    spread = max(float(row.std()) for row in wanted.values())
    worst = max(float((rows[place] - wanted[place]).abs().max()) for place in wanted)
    assert 0 < worst < spread


def test_experts_in_blocks_are_served(tmp_path: Path) -> None:
    """Slices, prefix hits and preemption, on a mixture of experts."""
    families.save("qwen3_moe", tmp_path, dtype="float32")
    pack(tmp_path, BLOCKS, in_blocks)
    played = Played(tmp_path)
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert played.distance(tmp_path) < TOLERANCE


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method is 'hqq'"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "w_bit": 3}, "w_bit is 3"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "packing_format"),
        ({"bits": 4}, "quantization_config.quant_method"),
        ("fp8", "quantization_config is 'fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 3}}},
            },
            "config_groups.group_0.weights is 'int3'",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "quantization_config.transform_config",
        ),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_name(config: object, words: str) -> None:
    with pytest.raises(ModelError) as refusal:
        packed_form({"quantization_config": config})  # type: ignore[dict-item]
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "scale, words",
    [
        (torch.ones(3, 3), "has shape [3, 3]"),
        (torch.ones(2), "has shape [2]"),
        (None, "is float8, and has no weight_scale_inv or weight_scale"),
    ],
)
def test_scales_of_a_wrong_shape_are_named(
    scale: Tensor | None, words: str, tmp_path: Path
) -> None:
    families.save("llama", tmp_path)
    pack(tmp_path, BLOCKS, in_blocks)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.weight_scale_inv"
    del tensors[name]
    save_file(tensors if scale is None else tensors | {name: scale}, file, {"format": "pt"})
    with pytest.raises(BrokenModel) as refusal:
        load_decoder(tmp_path)
    assert words in str(refusal.value)
    assert "model.layers.1.mlp.down_proj.weight" in str(refusal.value)
