"""Models in GGUF: our decoder of each against transformers' of the folder it was written from.

The package gguf writes and rounds; its numbers are the rule.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

import families
import tokenizers_made
from families import Played, logprobs_of, prompts
from gguf_files import ARCHITECTURES, Kind, rounded, save_gguf
from passes import Passes
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.layers.arithmetic import Arithmetic
from penstock.worker.llm import LLM
from penstock.worker.models.contract.spec import ModelSpec
from penstock.worker.models.folder.errors import ModelError
from penstock.worker.models.folder.gguf.packing import one_below_the_other, packed_weight
from penstock.worker.models.impl import load_model, plan_model
from penstock.worker.models.native.loading import load_decoder
from penstock.worker.models.pooling_model import load_pooling_model
from penstock.worker.process.model_folder import model_folder
from penstock.worker.text.model_tokenizer import ModelTokenizer

TOLERANCE = 1e-4
_PATTERN = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# What files in GGUF cannot say, or is always so.
FIXED: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 7, "layer_types": _PATTERN},
}
MORE: dict[str, dict[str, object]] = {
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biased": {"attention_bias": True, "mlp_bias": True},
    "llama, of Llama 3's positions": {"rope_parameters": _LLAMA3},
    "llama, wide heads": {"head_dim": 32},
    "qwen3, of YaRN": {"rope_parameters": _YARN},
    "phi3, of LongRoPE": {"rope_parameters": _LONG},
    "phi3, partial": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    }},
    "granite, factors": {
        "attention_multiplier": 0.3, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
        "logits_scaling": 0.125,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the folders that are made of files below the test's own."""
    monkeypatch.setattr("penstock.kernels.cpu.cache_folder.user_cache", lambda: tmp_path / "cache")


def save(name: str, folder: Path) -> None:
    family = name.partition(",")[0]
    families.save(family, folder, **FIXED.get(family, {}) | MORE.get(name, {}))


def distance(folder: Path, file: Path) -> float:
    decoder = load_decoder(model_folder(str(file)), "float32")
    wanted = logprobs_of(folder, prompts())
    rows = Passes(decoder, prompts()).whole().logits
    return max(
        float((row.log_softmax(-1) - wanted[seq][at]).abs().max())
        for (seq, at), row in rows.items()
    )


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
def test_log_probabilities_equal_those_of_the_folder(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "folder")
    file = save_gguf(tmp_path / "folder", tmp_path / "m.gguf")
    assert distance(tmp_path / "folder", file) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.BF16])
def test_rounded_numbers_are_what_the_package_says(name: str, kind: Kind, tmp_path: Path) -> None:
    """In float32; rows of weights are then gguf's own."""
    save(name, tmp_path / "folder")
    file = save_gguf(tmp_path / "folder", tmp_path / "m.gguf", kind)
    rounded(tmp_path / "folder", kind)
    assert distance(tmp_path / "folder", file) < TOLERANCE


def test_a_folder_with_a_file_plays_with_slices_and_preemption(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "folder")
    (tmp_path / "files").mkdir()
    save_gguf(tmp_path / "folder", tmp_path / "files" / "m.gguf", Kind.Q8_0)
    rounded(tmp_path / "folder", Kind.Q8_0)
    played = Played(model_folder(str(tmp_path / "files")))
    assert played.stats.num_preemptions and played.stats.cached_tokens
    assert played.distance(tmp_path / "folder") < TOLERANCE


def test_a_text_of_a_file_is_that_of_its_folder(tmp_path: Path) -> None:
    """Template, tokenizer, what ends a text and a grammar's tokens are the file's."""
    folder = tmp_path / "folder"
    families.save("llama", folder)
    tokenizers_made.save(tokenizers_made.byte_level(), folder)
    template = (folder / "chat_template.jinja").read_text()
    file = save_gguf(
        folder, tmp_path / "m.gguf", tokenizer=tokenizers_made.byte_level(), template=template
    )
    ours, theirs = ModelTokenizer(model_folder(str(file))), ModelTokenizer(folder)
    for text in (*tokenizers_made.CORPUS, "<|user|>two words<s>", " né€"):
        assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "The quick brown fox"}]
    answers = []
    for model in str(file), str(folder):
        llm = LLM(model, dtype="float32", max_model_len=128)
        answers.append(llm.chat(messages, SamplingParams(temperature=0, max_tokens=20)))
    assert answers[0][0].outputs[0].text == answers[1][0].outputs[0].text


@pytest.mark.parametrize("kind, words", [("I32", "I32, which is not read"), ("I8", "I8")])
def test_a_type_that_nothing_widens_is_refused_by_name(
    kind: str, words: str, tmp_path: Path
) -> None:
    save("llama", tmp_path / "folder")
    file = save_gguf(tmp_path / "folder", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(file, "r+")
    entry = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    entry.field.parts[4][0] = gguf.GGMLQuantizationType[kind]
    reader.data.flush()
    with pytest.raises(Exception, match=words):
        load_decoder(model_folder(str(file)))


def test_a_tensor_that_no_model_of_the_kind_has_is_refused(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "folder")
    path = tmp_path / "folder" / "model.safetensors"
    more = {"model.layers.1.self_attn.o_proj.bias": torch.ones(64)}
    save_file(load_file(path) | more, path, {"format": "pt"})
    file = save_gguf(tmp_path / "folder", tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"unexpected tensor blk\.1\.attn_output\.bias, one of 1"):
        load_decoder(model_folder(str(file)))


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "folder")
    path = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    for number, changed in enumerate((None, tensors[name][:, :64].contiguous())):
        rest = {each: tensor for each, tensor in tensors.items() if each != name}
        save_file(rest if changed is None else rest | {name: changed}, path, {"format": "pt"})
        file = save_gguf(tmp_path / "folder", tmp_path / f"{number}.gguf")
        words = r"blk\.1\.ffn_down\.weight " + (r"\(", "has shape")[number]
        with pytest.raises(ModelError, match=words):
            load_decoder(model_folder(str(file)))


def test_who_else_computes_models_refuses_a_file(tmp_path: Path) -> None:
    save("llama", tmp_path / "folder")
    folder = model_folder(str(save_gguf(tmp_path / "folder", tmp_path / "m.gguf")))
    with pytest.raises(ModelError, match=r"m\.gguf: .* leave model_impl out"):
        load_model(ModelSpec(folder, "transformers"))
    with pytest.raises(ModelError, match=r"m\.gguf: .* name the folder"):
        load_pooling_model(ModelSpec(folder))


def test_the_type_to_compute_in_is_the_files(tmp_path: Path) -> None:
    save("llama", tmp_path / "folder")
    types = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.Q8_0: torch.bfloat16}
    for kind, dtype in types.items():
        folder = model_folder(str(save_gguf(tmp_path / "folder", tmp_path / f"{kind}.gguf", kind)))
        assert plan_model(ModelSpec(folder)).dtype == dtype
        fields = json.loads((folder / "config.json").read_text())
        assert fields["model_type"] == "llama"


PACKED = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
)  # fmt: skip


def blocks(kind: Kind, rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Any bytes, with scales of 16 bits such that a row's numbers are of the usual size."""
    in_block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * columns // in_block, size), dtype=np.uint8)
    places = {Kind.Q6_K: [208]}.get(kind, [0] if kind.name.endswith("_0") else [0, 2])
    factor = 0.01
    for _ in range(2):
        for place in places:
            scales = factor * generator.standard_normal((len(data), 1))
            data[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
        factor /= float(dequantize(data, kind).std()) * columns**0.5
    return torch.from_numpy(data.reshape(rows, -1))


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_packed_numbers_are_those_of_the_package_to_the_bit(kind: Kind) -> None:
    rows = blocks(kind, 5, 1024)
    weight = packed_weight(rows, kind)
    assert weight is not None and weight.bits == (4 if kind.name.startswith("Q4") else 8)
    wanted = torch.from_numpy(dequantize(rows.numpy(), kind))
    assert torch.equal(weight.rows(slice(None), torch.float32), wanted)


def test_weights_of_several_kinds_are_one_product(tmp_path: Path) -> None:
    """As queries, keys and values of Q4_K_M are, of which half the values have Q6_K."""
    weights = []
    for kind in PACKED:
        weight = packed_weight(blocks(kind, 3, 512), kind)
        assert weight is not None
        weights.append(weight)
    whole = one_below_the_other(weights)
    assert (whole.bits, whole.group) == (8, 16)
    wanted = torch.cat([weight.rows(slice(None), torch.float32) for weight in weights])
    assert torch.equal(whole.rows(slice(None), torch.float32), wanted)


def save_blocks(folder: Path, file: Path, kinds: dict[str, Kind], usual: Kind) -> None:
    """Write a folder as a file of random blocks."""
    reader = gguf.GGUFReader(save_gguf(folder, file))
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    packed = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 2:
            kind = next((kinds[part] for part in kinds if part in name), usual)
            packed[name] = (blocks(kind, *shape, seed=number).numpy(), kind)
    save_gguf(folder, file, packed=packed)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_file_of_mixed_kinds_is_multiplied_as_it_is(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Q4_K_M is; the rows are rounded to 8 bits, so numbers are near those of float32."""
    caplog.set_level("INFO", "penstock.worker.models")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    families.save(name, tmp_path / "folder", **shape)
    file = tmp_path / "m.gguf"
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q5_K, "token_embd": Kind.Q6_K}
    save_blocks(tmp_path / "folder", file, kinds, Kind.Q4_K)
    folder = model_folder(str(file))
    decoder, exact = load_decoder(folder), load_decoder(folder, "float32")
    assert decoder.dtype == torch.bfloat16
    (line,) = [line for line in caplog.messages if "multiplied as they are stored" in line]
    assert "21 of Q4_K, 4 of Q5_K, 5 of Q6_K" in line
    rows, wanted = (Passes(each, prompts()).whole().logits for each in (decoder, exact))
    spread = float(torch.stack(list(wanted.values())).std())
    mean = sum(float((rows[place] - wanted[place]).abs().mean()) for place in wanted) / len(wanted)
    assert 0 < mean < spread / 8


def test_other_bits_than_the_files_are_refused(tmp_path: Path) -> None:
    families.save("llama", tmp_path / "folder", intermediate_size=128)
    folder = model_folder(str(save_gguf(tmp_path / "folder", tmp_path / "m.gguf", Kind.Q8_0)))
    with pytest.raises(ModelError, match=r"m\.gguf: its weights are Q8_0; leave it out"):
        load_decoder(folder, arithmetic=Arithmetic(quantization="int8"))
