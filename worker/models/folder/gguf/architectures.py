"""The kinds of models in GGUF that are read: what each is as one of Hugging Face's.

llama.cpp keeps facts in its code that Hugging Face keeps in config.json: they stand here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from penstock.worker.models.folder.errors import UnsupportedModel
from penstock.worker.models.folder.gguf.metadata import Metadata

FieldsOf = Callable[[Metadata], dict[str, JsonValue]]

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Hugging Face's name in a layer -> llama.cpp's.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PHI3_LAYER = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GEMMA_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MIXTRAL_LAYER = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
# How many layers the models of 27B have, whose queries are scaled otherwise.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a kind of model is read.

    fields    makes a config.json's fields of the metadata
    names     of a layer's tensors, Hugging Face's -> llama.cpp's, beside the usual ones
    is_paired  rows of queries and keys lie as llama.cpp turns them: two that turn together side by
              side, where Hugging Face has them half a head apart
    adds_one  the norms' weights have the one that Hugging Face's are less
    """

    fields: FieldsOf
    names: Mapping[str, str] = field(default_factory=dict)
    is_paired: bool = False
    adds_one: bool = False

    def stored(self, name: str) -> str:
        """Return llama.cpp's name of a module, whose experts are one tensor."""
        if not name.startswith("model.layers."):
            return _TOP.get(name, name)
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{self.names.get(rest) or _LAYER.get(rest, rest)}"


def architecture_of(metadata: Metadata) -> Architecture:
    """Return how the model is read. Raises UnsupportedModel where it is not."""
    name = metadata.architecture
    if name == "llama" and metadata.count("expert_count", 0):
        return _MIXTRAL_ARCHITECTURE
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{metadata.file}: general.architecture is {name!r}; read are "
            f"{', '.join(ARCHITECTURES)}; name the folder that it was converted from, or serve it "
            "by llama-server behind --engine openai"
        )
    return ARCHITECTURES[name]


def _usual(metadata: Metadata) -> dict[str, JsonValue]:
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    if heads < 1:
        name = f"{metadata.architecture}.attention.head_count"
        raise metadata.broken(name, heads, "1 or more")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{metadata.file}: heads of values of another size than those of keys"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length", hidden),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata, head_dim),
    }


def _rope(metadata: Metadata, head_dim: int) -> dict[str, JsonValue]:
    """Return the positions as transformers' `rope_parameters`."""
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "none")
    result: dict[str, JsonValue] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
    }
    if (width := metadata.count("rope.dimension_count", head_dim)) != head_dim:
        result["partial_rotary_factor"] = width / head_dim
    if kind in ("linear", "yarn"):
        result |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        result |= _yarn(metadata)
    return result


def _yarn(metadata: Metadata) -> dict[str, JsonValue]:
    length = metadata.count("context_length")
    result: dict[str, JsonValue] = {
        "original_max_position_embeddings": metadata.count(
            "rope.scaling.original_context_length", length
        )
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{name}"):
            result[name] = metadata.number(f"rope.scaling.yarn_{name}")
    return result


def _llama(metadata: Metadata) -> dict[str, JsonValue]:
    return _usual(metadata) | {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata.tensors,
    }


def _mixtral(metadata: Metadata) -> dict[str, JsonValue]:
    experts = _experts(metadata, "num_local_experts")
    return _usual(metadata) | experts | {"model_type": "mixtral", "sliding_window": None}


def _experts(metadata: Metadata, field: str) -> dict[str, JsonValue]:
    """Return how many experts there are, in a field of this name, and how many a token has."""
    num, num_chosen = metadata.count("expert_count"), metadata.count("expert_used_count")
    return {field: num, "num_experts_per_tok": num_chosen}


def _granite(metadata: Metadata) -> dict[str, JsonValue]:
    """Return Llama's fields, and the factors, of which those of 0 are none."""
    fields = _llama(metadata)
    scale = metadata.number("attention.scale", 0.0)
    return fields | {
        "model_type": "granite",
        "attention_multiplier": scale or _usual_scale(metadata),
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale", 0.0) or 1.0,
    }


def _usual_scale(metadata: Metadata) -> float:
    head_dim = metadata.count(
        "attention.key_length",
        metadata.count("embedding_length") // metadata.count("attention.head_count"),
    )
    return float(max(head_dim, 1) ** -0.5)


def _smollm3(metadata: Metadata) -> dict[str, JsonValue]:
    return _llama(metadata) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


def _qwen2(metadata: Metadata) -> dict[str, JsonValue]:
    return _usual(metadata) | {"model_type": "qwen2"}


def _qwen3(metadata: Metadata) -> dict[str, JsonValue]:
    has_bias = "blk.0.attn_q.bias" in metadata.tensors
    return _usual(metadata) | {"model_type": "qwen3", "attention_bias": has_bias}


def _qwen2_moe(metadata: Metadata) -> dict[str, JsonValue]:
    width = metadata.count("expert_shared_feed_forward_length")
    has_bias = "blk.0.attn_q.bias" in metadata.tensors
    more = {"shared_expert_intermediate_size": width, "qkv_bias": has_bias}
    return _qwen_moe(metadata) | more | {"model_type": "qwen2_moe", "norm_topk_prob": False}


def _qwen3_moe(metadata: Metadata) -> dict[str, JsonValue]:
    return _qwen_moe(metadata) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _qwen_moe(metadata: Metadata) -> dict[str, JsonValue]:
    width = metadata.count("expert_feed_forward_length")
    experts = _experts(metadata, "num_experts")
    return _usual(metadata) | experts | {"moe_intermediate_size": width}


def _phi3(metadata: Metadata) -> dict[str, JsonValue]:
    window, name = metadata.count("attention.sliding_window", 0), "original_max_position_embeddings"
    length = metadata.count("context_length")
    length = metadata.count("rope.scaling.original_context_length", length)
    more: dict[str, JsonValue] = {"sliding_window": window or None, name: length}
    return _usual(metadata) | more | {"model_type": "phi3"}


def _gemma(metadata: Metadata) -> dict[str, JsonValue]:
    name = "gelu_pytorch_tanh"
    return _usual(metadata) | {"model_type": "gemma", "hidden_act": name, "hidden_activation": name}


def _gemma2(metadata: Metadata) -> dict[str, JsonValue]:
    fields = _gemma(metadata)
    return fields | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scalar(fields, "gemma2"),
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, JsonValue]:
    fields = _gemma(metadata)
    window = metadata.count("attention.sliding_window", 0)
    softcap = metadata.number("final_logit_softcapping", 0.0)
    theta = metadata.number("rope.freq_base_swa", 1e4)
    of_windows: dict[str, JsonValue] = {"rope_type": "default", "rope_theta": theta}
    return fields | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scalar(fields, "gemma3"),
        "sliding_window": window or None,
        "layer_types": _layer_types(metadata, 6 if window else 1),
        "final_logit_softcapping": softcap or None,
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": of_windows,
        },
    }


def _query_scalar(fields: Mapping[str, JsonValue], name: str) -> JsonValue:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if fields["num_hidden_layers"] != _LAYERS_OF_27B[name]:
        return fields["head_dim"]
    assert isinstance(hidden, int) and isinstance(heads, int), "counts are whole numbers"
    return hidden // heads


def _layer_types(metadata: Metadata, period: int) -> list[JsonValue]:
    """Return which layers have a window: the file's word, or all but the last of each period."""
    name = f"{metadata.architecture}.attention.sliding_window_pattern"
    pattern, num = metadata.fields.get(name), metadata.count("block_count")
    if isinstance(pattern, list):
        has_window = [bool(item) for item in pattern]
    else:
        period = period if pattern is None else metadata.count("attention.sliding_window_pattern")
        has_window = [
            period == 0 or layer % period < period - 1 for layer in range(min(num, 10_000))
        ]
    return ["sliding_attention" if item else "full_attention" for item in has_window]


_MIXTRAL_ARCHITECTURE = Architecture(_mixtral, _MIXTRAL_LAYER, is_paired=True)
ARCHITECTURES = {
    "llama": Architecture(_llama, is_paired=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen2moe": Architecture(_qwen2_moe, _EXPERTS),
    "qwen3moe": Architecture(_qwen3_moe, _EXPERTS),
    "gemma": Architecture(_gemma, adds_one=True),
    "gemma2": Architecture(_gemma2, _GEMMA_LAYER, adds_one=True),
    "gemma3": Architecture(_gemma3, _GEMMA_LAYER, adds_one=True),
    "phi3": Architecture(_phi3, _PHI3_LAYER),
    "granite": Architecture(_granite, is_paired=True),
    "smollm3": Architecture(_smollm3, is_paired=True),
}
