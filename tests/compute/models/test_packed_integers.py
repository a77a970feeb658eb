"""Checkpoints of integers, whole: by tensors as their writers lay them, against transformers."""

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
from packers import AWQ, GPTQ, GROUP, Packed, Pair, by_awq, by_gptq, pack, save
from passes import Passes
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import BrokenModel
from penstock.worker.models.native.decoder import Decoder
from penstock.worker.models.native.loading import load_decoder, plan_decoder


def largest_difference(decoder: Decoder, wanted: list[Tensor]) -> float:
    rows = Passes(decoder, prompts()).whole().logits
    return max(
        float((row.log_softmax(-1) - wanted[seq][at]).abs().max())
        for (seq, at), row in rows.items()
    )


def bits_of(decoder: Decoder) -> set[int]:
    """Return the bits of the first layer's products."""
    layer = decoder.layers._layers[0]
    products = [layer.attention.qkv, layer.output, layer.mlp.up, layer.mlp.down]
    return {product.panels.layout.bits for product in products if product.panels}


WAYS: dict[str, tuple[dict[str, object], Pair]] = {
    "gptq": (GPTQ, by_gptq),
    "gptq by activity": (GPTQ | {"desc_act": True}, lambda *pair: by_gptq(*pair, 4, True)),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, lambda *pair: by_gptq(*pair, 8)),
    "awq": (AWQ, by_awq),
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("way", WAYS)
def test_integers_equal_transformers(way: str, name: str, tmp_path: Path) -> None:
    """In float32, of what they stand for; as they are near it, for rows are rounded."""
    families.save(name, dense := tmp_path / "dense", dtype="float32")
    config, pair = WAYS[way]
    packed = pack(dense, tmp_path / "packed", config, pair)
    wanted = logprobs_of(dense, prompts())
    assert largest_difference(load_decoder(packed, "float32"), wanted) < 1e-4
    decoder = load_decoder(packed)
    assert decoder.dtype == torch.bfloat16
    assert bits_of(decoder) == {8 if "8 bits" in way else 4}
    spread = max(float(row.std()) for row in wanted)
    assert largest_difference(decoder, wanted) < spread / 3


SCHEMES = {
    "int4": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": True},
    "int4 with zero points": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": False,
    },
    "int8": {"num_bits": 8, "strategy": "channel", "symmetric": True},
}


@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_integers_that_compressed_tensors_writes(scheme: str, form: str, tmp_path: Path) -> None:
    families.save("qwen3", tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    args = QuantizationArgs(type="int", **SCHEMES[scheme])
    activations = None
    if form == "int-quantized":  # W8A8, of rows as they come
        activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    schemes = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    config = QuantizationConfig(config_groups={"group_0": schemes}, ignore=["lm_head"], format=form)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None):
            most = module.weight.view(len(module.weight), -1, args.group_size or module.in_features)
            low, high = most.amin(-1).clamp(max=0), most.amax(-1).clamp(min=0)
            if args.symmetric:
                scale = torch.maximum(high, -low) / (2 ** (args.num_bits - 1) - 1)
            else:
                scale = (high - low) / (2**args.num_bits - 1)
                zero = (-(2 ** (args.num_bits - 1)) - low / scale).round()
                module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
            module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder := tmp_path / "packed")
    compressor.update_config(folder)
    compressor.decompress_model(model)
    kept = load_file(tmp_path / "dense" / "model.safetensors")
    save({name: model.state_dict()[name] for name in kept}, tmp_path / "dense")
    wanted = logprobs_of(tmp_path / "dense", prompts())
    assert largest_difference(load_decoder(folder, "float32"), wanted) < 1e-4
    decoder = load_decoder(folder)
    assert bits_of(decoder) == ({8} if form == "int-quantized" else {args.num_bits})
    assert largest_difference(decoder, wanted) < max(float(row.std()) for row in wanted) / 3


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_experts_of_integers_are_served(name: str, tmp_path: Path) -> None:
    """Slices, prefix hits and preemption; the same text without any of them."""
    families.save(name, dense := tmp_path / "dense", dtype="float32")
    packed = pack(dense, tmp_path / "packed", GPTQ, by_gptq)
    played = Played(packed)
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert played.distance(dense) < 1e-4
    hurried = Played(packed, dtype="auto", deterministic=True)
    calm = Played(
        packed, dtype="auto", deterministic=True, num_gpu_blocks_override=200,
        max_num_batched_tokens=512, enable_prefix_caching=False,
    )  # fmt: skip
    assert hurried.stats.num_preemptions and hurried.stats.cached_tokens
    assert hurried.sequences == calm.sequences


def test_what_lies_unlike_its_neighbours_is_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where some modules of a layer are left as they are."""
    families.save("llama", dense := tmp_path / "dense", dtype="float32")
    folder = pack(dense, tmp_path / "packed", GPTQ, by_gptq)
    file, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    rest = {key: each for key, each in tensors.items() if not key.startswith(f"{name}.")}
    whole = load_file(dense / "model.safetensors")[f"{name}.weight"]
    save_file(rest | {f"{name}.weight": whole}, file, {"format": "pt"})
    with caplog.at_level("INFO"):
        decoder = load_decoder(folder)
    assert "3 modules are widened, model.layers.0.self_attn.q_proj the first" in caplog.text
    assert "rows rounded to 8 bits" in caplog.text
    wanted = logprobs_of(dense, prompts())
    assert largest_difference(decoder, wanted) < max(float(row.std()) for row in wanted) / 3


def test_packed_unlike_one_another(tmp_path: Path) -> None:
    """Modules of one product, each of a form that is multiplied."""
    families.save("llama", dense := tmp_path / "dense", dtype="float32")

    def pair(module: str, weight: Tensor) -> Packed:
        return by_gptq(module, weight, 8 if "k_proj" in module else 4, "v_proj" in module)

    folder = pack(dense, tmp_path / "packed", GPTQ, pair)
    decoder, wanted = load_decoder(folder), logprobs_of(dense, prompts())
    assert largest_difference(decoder, wanted) < max(float(row.std()) for row in wanted) / 3
    assert bits_of(decoder) == {4, 16}


def test_a_bias_that_is_no_zero_is_not_left_out(tmp_path: Path) -> None:
    families.save("llama", dense := tmp_path / "dense", dtype="float32")
    folder = pack(dense, tmp_path / "packed", GPTQ, by_gptq)
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    save_file(load_file(file) | {name: torch.ones(96)}, file, {"format": "pt"})
    with pytest.raises(BrokenModel, match=f"unexpected tensor {name}, one of 1"):
        load_decoder(folder)


def test_a_plan_of_integers_needs_no_type(tmp_path: Path) -> None:
    families.save("llama", dense := tmp_path / "dense", dtype="float32")
    folder = pack(dense, tmp_path / "packed", AWQ, by_awq)
    assert plan_decoder(ModelSpec(folder)).dtype == torch.bfloat16
