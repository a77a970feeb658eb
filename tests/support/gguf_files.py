"""Writes a folder of Hugging Face's form as GGUF, as llama.cpp's convert_hf_to_gguf.py does.

The package gguf writes the file, names the tensors and rounds them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig

Kind = gguf.GGMLQuantizationType
Numbers = NDArray[np.float32]
# transformers' `model_type` -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
}
_PAIRED = {"llama", "granite", "smollm3"}
_COUNTS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

# Of a file that is written without a folder: a Llama with 14 tokens.
GGUF_TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "<|im_end|>", "cd"]
_OF_LAYER: dict[str, tuple[int, ...]] = {
    "attn_norm": (32,),
    "ffn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}
GGUF_SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (len(GGUF_TOKENS), 32),
    "output_norm.weight": (32,),
    **{
        f"blk.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in _OF_LAYER.items()
    },
}


@dataclass
class Source:
    """A folder to convert: its configuration, and llama.cpp's name of it."""

    folder: Path
    config: Any

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.config.model_type]

    @property
    def head_dim(self) -> int:
        heads = self.config.num_attention_heads
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)


def save_gguf(
    folder: Path,
    file: Path,
    kind: Kind = Kind.F32,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    packed: Mapping[str, tuple[NDArray[np.uint8], Kind]] = MappingProxyType({}),
) -> Path:
    """Write the folder's model as a file, with weights of this kind.

    packed  the blocks of some tensors
    """
    source = Source(folder, AutoConfig.from_pretrained(folder))
    writer = gguf.GGUFWriter(file, source.architecture)
    writer.add_name(folder.name)
    _add_fields(writer, source)
    add_tokenizer(writer, source.config.vocab_size, tokenizer)
    if template:
        writer.add_chat_template(template)
    for name, numbers in _tensors(source):
        if name in packed:
            writer.add_tensor(name, packed[name][0], raw_dtype=packed[name][1])
        elif numbers.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, quantize(numbers, kind), raw_dtype=kind)
    return _closed(writer, file)


def write_gguf(
    file: Path, change: Callable[[gguf.GGUFWriter], None] | None = None, **options: Any
) -> Path:
    """Write a tiny file of random numbers in Q8_0; `change` goes last before the tensors."""
    writer = gguf.GGUFWriter(file, "llama", **options)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3 if token[0] == "<" else 1 for token in GGUF_TOKENS])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    if change:
        change(writer)
    generator = np.random.default_rng(1)
    for name, shape in GGUF_SHAPES.items():
        numbers = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, quantize(numbers, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    return _closed(writer, file)


def _closed(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rounded(folder: Path, kind: Kind) -> None:
    """Let a folder's weights be what those of its GGUF of this kind stand for."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not name.endswith((".gate.weight", "shared_expert_gate.weight")):
            packed = quantize(tensor.float().numpy(), kind)
            tensors[name] = torch.from_numpy(dequantize(packed, kind))
    save_file(tensors, path, {"format": "pt"})


def add_tokenizer(writer: gguf.GGUFWriter, size: int, tokenizer: Tokenizer | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [f"[PAD{number}]" for number in range(size)]
    types, merges = [gguf.TokenType.UNUSED] * size, ["w 0"]
    if tokenizer is not None:
        model = json_of(tokenizer)
        for token, number in model["model"]["vocab"].items():
            tokens[number], types[number] = token, gguf.TokenType.NORMAL
        for token in model["added_tokens"]:
            kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
            tokens[token["id"]], types[token["id"]] = token["content"], kind
        merges = [" ".join(pair) for pair in model["model"]["merges"]]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(tokenizer is not None)


def json_of(tokenizer: Tokenizer) -> dict[str, Any]:
    import json

    return dict(json.loads(tokenizer.to_str()))


def _add_fields(writer: gguf.GGUFWriter, source: Source) -> None:
    config, name = source.config, source.architecture
    for field, key in _COUNTS.items():
        if getattr(config, field, None) is not None:
            writer.add_uint32(f"{name}.{key}", getattr(config, field))
    for field, key in _NUMBERS.items():
        if getattr(config, field, None) is not None:
            writer.add_float32(f"{name}.{key}", getattr(config, field))
    writer.add_key_length(source.head_dim)
    writer.add_value_length(source.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    width = int(source.head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)


def _tensors(source: Source) -> Iterator[tuple[str, Numbers]]:
    config = source.config
    architecture = next(
        arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == source.architecture
    )
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stacks: dict[str, list[Numbers]] = {}
    for name, tensor in load_file(source.folder / "model.safetensors").items():
        numbers = tensor.float().numpy()
        words = name.split(".")
        if "experts" in words:
            at = words.index("experts")
            del words[at + 1]
            name = ".".join(words).replace("model.layers", "layers", "block_sparse_moe" in words)
            name = name.replace("block_sparse_moe", "feed_forward")
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name, f"{name} has no name in GGUF"
        if "experts" in words:
            stacks.setdefault(stored_name, []).append(numbers)
            continue
        yield stored_name, _changed(source, name, numbers)
    for stored_name, parts in stacks.items():
        yield stored_name, np.stack(parts)
    yield from _factors(config, source.head_dim)


def _changed(source: Source, name: str, numbers: Numbers) -> Numbers:
    """Return numbers as llama.cpp has them: norms of Gemma with their one, pairs together."""
    config = source.config
    if source.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return numbers + np.float32(1)
    if source.architecture in _PAIRED and ".q_proj." in name:
        return _paired(numbers, config.num_attention_heads)
    if source.architecture in _PAIRED and ".k_proj." in name:
        return _paired(numbers, config.num_key_value_heads)
    return numbers.reshape(-1) if name.endswith("shared_expert_gate.weight") else numbers


def _paired(numbers: Numbers, heads: int) -> Numbers:
    halves = numbers.reshape(heads, 2, len(numbers) // heads // 2, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)


def _factors(config: Any, head_dim: int) -> Iterator[tuple[str, Numbers]]:
    """Yield by what each frequency of the positions is divided, where tensors say so."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        stretched = ROPE_INIT_FUNCTIONS["llama3"](config)[0].numpy()
        yield "rope_freqs.weight", (plain / stretched).astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            numbers = np.array(rope[f"{length}_factor"], dtype=np.float32)
            yield f"rope_factors_{length}.weight", numbers
