"""The model configuration that a decoder needs, derived once from the model's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from pydantic import JsonValue

from penstock.worker.models.errors import (
    BrokenModel,
    UnknownOverride,
    UnsupportedField,
    WrongValue,
)
from penstock.worker.models.files import read_object
from penstock.worker.models.hugging_face import CONFIG_MAPPING, PreTrainedConfig
from penstock.worker.models.rope import Rope, rope
from penstock.worker.models.served import KvShape


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between one family's checkpoints and Llama's.

    qkv_bias        queries, keys and values always have a bias
    attention_bias  the configuration's field `attention_bias` is obeyed, for the output too
    mlp_bias        the configuration's field `mlp_bias` is obeyed
    qk_norm         each head of queries and keys is normalised before it is rotated
    sliding_window  the configuration's field `sliding_window` is obeyed
    layer_types     the configuration's field `layer_types` is obeyed: some layers have the window,
                    some see all
    """

    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False
    layer_types: bool = False


# By transformers' `model_type`. What else a new one touches: docs/where.md, "Add a model family".
FAMILIES = {
    "llama": Family(attention_bias=True, mlp_bias=True),
    "mistral": Family(sliding_window=True),
    "qwen2": Family(qkv_bias=True, sliding_window=True, layer_types=True),
    "qwen3": Family(attention_bias=True, qk_norm=True, sliding_window=True, layer_types=True),
}

NOTHING: Mapping[str, JsonValue] = MappingProxyType({})
OLD_ROPE = ("rope_scaling", "rope_theta")  # transformers turns these into `rope_parameters`
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)

# Fields of related architectures that change the computation. A folder that sets one is refused.
FOREIGN_FIELDS = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "kv_lora_rank",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "query_pre_attn_scalar",
    "residual_multiplier",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model.

    max_model_len  the number of tokens that the positions are made for
    windows        for each layer the number of keys that a query sees; None means all
    dtype          None where the file does not say
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: Rope
    eos_token_ids: frozenset[int]
    dtype: torch.dtype | None

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return (KvShape(self.num_kv_heads, self.head_dim),) * self.num_layers


def read_config(path: Path, overrides: Mapping[str, JsonValue] = NOTHING) -> ModelConfig:
    """Read the configuration in a Hugging Face folder, with some fields replaced by `overrides`.

    Raises a ModelError that names what cannot be served.
    """
    written = read_object(path / "config.json")
    fields = overridden(written, overrides)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedField("model_type", model_type, ", ".join(FAMILIES))
    _refuse_foreign(fields)
    refuse_counts(fields)
    try:
        hf = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # of many types; its message names the field
        raise BrokenModel(f"{path / 'config.json'}: {' '.join(str(error).split())}") from error
    usual = CONFIG_MAPPING[model_type]() if overrides else hf
    for field in overrides:
        if not (field in written or field in OLD_ROPE or hasattr(usual, field)):
            raise UnknownOverride(field, model_type)
    return _derive(hf, FAMILIES[model_type], eos_token_ids(path, hf))


def overridden(
    fields: Mapping[str, JsonValue], overrides: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the fields with the overrides in place.

    Objects are merged, so that a field inside one may be given alone.
    """
    found = dict(fields)
    for field, value in overrides.items():
        if field == "rope_scaling" and isinstance(fields.get("rope_parameters"), dict):
            field = "rope_parameters"  # the newer spelling, which would win
        old = found.get(field)
        if isinstance(value, dict) and isinstance(old, dict):
            if field == "rope_parameters" and "type" in value:
                value = {"rope_type": value["type"]} | value
            value = overridden(old, value)
        found[field] = value
    return found


def max_model_len(hf: PreTrainedConfig) -> int:
    """Return the length that the positions are made for, derived as vLLM does.

    Stretched positions multiply the length that they stretch. Llama 3's is stretched already.
    """
    rope, length = getattr(hf, "rope_parameters", None) or {}, int(hf.max_position_embeddings)
    if rope.get("rope_type") == "yarn":
        length = int(rope["original_max_position_embeddings"] * rope["factor"])
    elif rope.get("rope_type") == "linear":
        length = int(length * rope["factor"])
    return length


def _derive(hf: PreTrainedConfig, family: Family, enders: frozenset[int]) -> ModelConfig:
    if hf.hidden_act not in ("silu", "swish"):
        raise UnsupportedField("hidden_act", hf.hidden_act, "silu")
    attention_bias = family.attention_bias and bool(hf.attention_bias)
    num_heads, num_kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if num_heads % num_kv_heads:
        raise WrongValue(
            "num_key_value_heads", num_kv_heads, f"divisors of num_attention_heads, {num_heads}"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // num_heads
    if head_dim % 2:
        raise UnsupportedField("head_dim", head_dim, "even head sizes")
    return ModelConfig(
        family=hf.model_type,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=hf.vocab_size,
        max_model_len=max_model_len(hf),
        rms_norm_eps=hf.rms_norm_eps,
        initializer_range=hf.initializer_range,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(hf.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(hf, family),
        rope=_rope(hf, head_dim),
        # An id that the head has no row for is never drawn.
        eos_token_ids=frozenset(each for each in enders if 0 <= each < hf.vocab_size),
        dtype=dtype_of(hf),
    )


def _rope(hf: PreTrainedConfig, head_dim: int) -> Rope:
    try:
        return rope(hf, head_dim)
    except (ArithmeticError, LookupError, TypeError) as error:
        raise BrokenModel(
            f"config.json: rope_parameters is {hf.rope_parameters!r}: {error}"
        ) from error


def _refuse_foreign(fields: Mapping[str, JsonValue]) -> None:
    for field in FOREIGN_FIELDS:
        if fields.get(field) is not None:
            raise UnsupportedField(field, fields[field], "models without it")


def refuse_counts(fields: Mapping[str, JsonValue]) -> None:
    """Refuse counts below 1 and a negative eps, before transformers divides by a count.

    transformers itself refuses values of other types.
    """
    for field in _COUNTS:
        count = fields.get(field)
        if isinstance(count, int) and count < 1:
            raise WrongValue(field, count, "1 or more")
    eps = fields.get("rms_norm_eps")
    if isinstance(eps, int | float) and eps < 0:
        raise WrongValue("rms_norm_eps", eps, "0 or more")


def _windows(hf: PreTrainedConfig, family: Family) -> tuple[int | None, ...]:
    window: int | None = hf.sliding_window if family.sliding_window else None
    num_layers: int = hf.num_hidden_layers
    layer_types: list[str] | None = getattr(hf, "layer_types", None)
    if layer_types is None:
        return tuple([window] * num_layers)
    if not family.layer_types:
        raise UnsupportedField("layer_types", layer_types, f"{hf.model_type} layers all alike")
    if len(layer_types) != num_layers:
        raise WrongValue("layer_types", layer_types, f"one for each of {num_layers} layers")
    kinds = {"full_attention": None, "sliding_attention": window}
    for kind in layer_types:
        if kind not in kinds or (kind == "sliding_attention" and window is None):
            raise UnsupportedField(
                "layer_types", kind, "full_attention, and sliding_attention with a sliding_window"
            )
    return tuple([kinds[kind] for kind in layer_types])


def eos_token_ids(path: Path, hf: PreTrainedConfig) -> frozenset[int]:
    """Return the ids that end a completion.

    generation_config.json goes first: chat models end turns with ids that only it has.
    """
    generation = path / "generation_config.json"
    found = read_object(generation).get("eos_token_id") if generation.exists() else None
    ids = hf.eos_token_id if found is None else found
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) for token_id in listed):
        raise BrokenModel(f"{path}: eos_token_id is {ids!r}; it must be an id or a list of ids")
    return frozenset(listed)


def dtype_of(hf: PreTrainedConfig) -> torch.dtype | None:
    found = hf.dtype
    if isinstance(found, str):
        found = getattr(torch, found, None)
    return found if isinstance(found, torch.dtype) else None
