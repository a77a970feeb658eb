"""Writes the comparison's checkpoint as GGUF, llama.cpp's format.

It needs gguf, llama.cpp's own package.
"""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

Kind = Literal["F32", "BF16", "Q8_0", "Q4_0"]

_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_gguf(checkpoint: Path, file: Path, kind: Kind) -> None:
    """Write a checkpoint, a folder of a Llama as of `save_shape`, as GGUF."""
    config = AutoConfig.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(checkpoint.name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, checkpoint)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        part, gguf_name = _known(name)
        numbers = weight.float().numpy()
        if part in heads:
            numbers = _pairs_together(numbers, heads[part])
        if numbers.ndim == 1:
            writer.add_tensor(gguf_name, numbers)
        else:
            packing = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name, quantize(numbers, packing), raw_dtype=packing)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
            for number in range(len(tokenizer))
        ]
    )
    writer.add_token_merges(["w 0"])  # the tokenizer has none, and llama.cpp takes no empty list
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


def _known(name: str) -> tuple[str, str]:
    """Return a tensor's part of its layer, and llama.cpp's name for the tensor."""
    words = name.removeprefix("model.").removesuffix(".weight")
    if words in _TOP:
        return words, f"{_TOP[words]}.weight"
    _, layer, rest = words.split(".", 2)
    return _OF_LAYER[rest], f"blk.{layer}.{_OF_LAYER[rest]}.weight"


def _pairs_together(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows for llama.cpp, which rotates neighbours in a head, not its two halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
