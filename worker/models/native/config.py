"""The model configuration that a decoder needs, derived once from the model's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from pydantic import JsonValue

from penstock.worker.models.contract.served import KvShape
from penstock.worker.models.families.architecture import DecoderConfig
from penstock.worker.models.families.seeing import SEEING, TEXT_FAMILIES
from penstock.worker.models.families.table import FAMILIES
from penstock.worker.models.folder.errors import (
    BrokenModel,
    ModelError,
    UnknownOverride,
    UnsupportedField,
    WrongValue,
    reason,
)
from penstock.worker.models.folder.fields import Fields
from penstock.worker.models.folder.files import read_object
from penstock.worker.models.folder.hugging_face import CONFIG_MAPPING, PreTrainedConfig
from penstock.worker.models.folder.packed import PackedForm, packed_form

NO_OVERRIDES: Mapping[str, JsonValue] = MappingProxyType({})
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

_SAME = {"kimi_k2": "deepseek_v3"}  # what makers call a family that has a name
_MAX_LAYERS = 10_000  # before lists of them fill the memory

# Fields of related architectures that change the computation. A folder that sets one is refused.
FOREIGN_FIELDS = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "kv_lora_rank",
    "layer_types",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "query_pre_attn_scalar",
    "residual_multiplier",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model.

    max_model_len  the number of tokens that the positions are made for
    dtype          None where the file does not say
    sees           the text's decoder is one part of the folder's model
    packed_form    that of the folder's weights, where they have few bits
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_model_len: int
    initializer_range: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    dtype: torch.dtype | None
    decoder: DecoderConfig
    sees: bool = False
    packed_form: PackedForm | None = None

    @property
    def state_bytes(self) -> int:
        return 0

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        shapes = (layer.attention.shape for layer in self.decoder.layers)
        return tuple(KvShape(shape.num_kv_heads, shape.head_dim, shape.parts) for shape in shapes)


def read_config(path: Path, overrides: Mapping[str, JsonValue] = NO_OVERRIDES) -> ModelConfig:
    """Read the configuration in a Hugging Face folder, with some fields replaced by `overrides`.

    Raises a ModelError that names what cannot be served.
    """
    fields, whole = _whole(path, overrides)
    sees = whole.model_type in SEEING
    hf = whole.get_text_config() if sees else whole
    family, usual_fields = TEXT_FAMILIES.get(hf.model_type, (hf.model_type, {}))
    if family not in FAMILIES:
        raise UnsupportedField("text_config.model_type", family, ", ".join(FAMILIES))
    read = Fields(hf, usual_fields)
    decoder = _described(family, read)
    text_fields = fields.get("text_config")
    all_fields = fields | text_fields if isinstance(text_fields, dict) else fields
    _refuse_foreign(all_fields, read)
    enders = eos_token_ids(path, whole)
    return ModelConfig(
        family=whole.model_type,
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        max_model_len=max_model_len(hf),
        initializer_range=hf.initializer_range,
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        # An id that the head has no row for is never drawn.
        eos_token_ids=frozenset(token_id for token_id in enders if 0 <= token_id < hf.vocab_size),
        dtype=dtype_of(whole) or dtype_of(hf),
        decoder=decoder,
        sees=sees,
        packed_form=packed_form(fields),
    )


def _whole(
    path: Path, overrides: Mapping[str, JsonValue]
) -> tuple[dict[str, JsonValue], PreTrainedConfig]:
    """Return the fields, and the configuration that transformers makes of them."""
    file_fields = read_object(path / "config.json")
    fields = overridden(file_fields, overrides)
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in _SAME:
        model_type = fields["model_type"] = _SAME[model_type]
    if not isinstance(model_type, str) or not (model_type in SEEING or model_type in FAMILIES):
        raise UnsupportedField("model_type", model_type, ", ".join(FAMILIES))
    refuse_counts(fields)
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # many types; its message names the field
        raise BrokenModel(f"{path / 'config.json'}: {' '.join(str(error).split())}") from error
    _refuse_unknown(overrides, file_fields, whole)
    return fields, whole


def _refuse_unknown(
    overrides: Mapping[str, JsonValue],
    file_fields: Mapping[str, JsonValue],
    hf: PreTrainedConfig,
    place: str = "",
) -> None:
    """Refuse overrides of fields that nothing reads.

    place  what goes before the fields' names
    """
    new = overrides.keys() - file_fields.keys()
    usual = type(hf)() if new else None
    if hasattr(usual, "rope_parameters"):
        new -= {*OLD_ROPE}
    for field in sorted(new):
        if not hasattr(usual, field):
            raise UnknownOverride(f"{place}{field}", hf.model_type)
    inner, old = overrides.get("text_config"), file_fields.get("text_config")
    if isinstance(inner, dict) and isinstance(old, dict):
        _refuse_unknown(inner, old, hf.get_text_config(), f"{place}text_config.")


def overridden(
    fields: Mapping[str, JsonValue], overrides: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the fields with the overrides in place.

    Objects are merged, so that a field inside one may be given alone.
    """
    result = dict(fields)
    for field, value in overrides.items():
        if field == "rope_scaling" and isinstance(fields.get("rope_parameters"), dict):
            field = "rope_parameters"  # the newer spelling, which would win
        old = result.get(field)
        if isinstance(value, dict) and isinstance(old, dict):
            if field == "rope_parameters" and "type" in value:
                value = {"rope_type": value["type"]} | value
            value = overridden(old, value)
        result[field] = value
    return result


def max_model_len(hf: PreTrainedConfig) -> int:
    """Return the length that the positions are made for, derived as vLLM does.

    Stretched positions multiply the length that they stretch. Llama 3's is stretched already.
    """
    rope, length = getattr(hf, "rope_parameters", None) or {}, int(hf.max_position_embeddings)
    if rope.get("rope_type") == "yarn":
        length = int(rope["original_max_position_embeddings"] * rope["factor"])
    elif rope.get("rope_type") in ("linear", "dynamic"):
        length = int(length * rope["factor"])
    return length


def _described(family: str, read: Fields) -> DecoderConfig:
    try:
        return FAMILIES[family](read)
    except ModelError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        of_fields = f"one of {', '.join(sorted(read.were_read))} cannot be"
        raise BrokenModel(f"config.json: {of_fields}: {reason(error)}") from error


def _refuse_foreign(fields: Mapping[str, JsonValue], read: Fields) -> None:
    """Refuse what changes the numbers of related families, and this one does not read."""
    for field in FOREIGN_FIELDS:
        value = fields.get(field)
        if value is not None and read.hf.attribute_map.get(field, field) not in read.were_read:
            raise UnsupportedField(field, value, f"models of {read.hf.model_type} without it")


def refuse_counts(fields: Mapping[str, JsonValue]) -> None:
    """Refuse counts below 1 and a negative eps, before transformers divides by a count.

    transformers itself refuses values of other types.
    """
    for field in _COUNTS:
        count = fields.get(field)
        if isinstance(count, int) and count < 1:
            raise WrongValue(field, count, "1 or more")
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise WrongValue("num_hidden_layers", layers, f"{_MAX_LAYERS} or fewer")
    inner = fields.get("text_config")
    if isinstance(inner, dict):
        refuse_counts(inner)
    eps = fields.get("rms_norm_eps")
    if isinstance(eps, int | float) and eps < 0:
        raise WrongValue("rms_norm_eps", eps, "0 or more")


def eos_token_ids(path: Path, hf: PreTrainedConfig) -> frozenset[int]:
    """Return the ids that end a completion.

    generation_config.json goes first: chat models end turns with ids that only it has. Then, as in
    transformers, the whole model goes before its text.
    """
    generation = path / "generation_config.json"
    value = read_object(generation).get("eos_token_id") if generation.exists() else None
    for config in (hf, hf.get_text_config()):
        value = getattr(config, "eos_token_id", None) if value is None else value
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    token_ids = [token_id for token_id in values if isinstance(token_id, int)]
    if len(token_ids) < len(values):
        raise BrokenModel(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return frozenset(token_ids)


def dtype_of(hf: PreTrainedConfig) -> torch.dtype | None:
    dtype = hf.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else None
