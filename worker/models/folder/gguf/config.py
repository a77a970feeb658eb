"""A GGUF file's metadata as the fields of Hugging Face's configurations."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from penstock.worker.models.folder.gguf.architectures import architecture_of
from penstock.worker.models.folder.gguf.metadata import Metadata
from penstock.worker.models.folder.gguf.model import GgufModel
from penstock.worker.models.folder.gguf.vocabulary import PREFIX, GgufVocabulary

# Tensors of which the configuration is made, and no layer.
TO_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_fields(
    model: GgufModel, metadata: Metadata, factors: Mapping[str, Sequence[float]]
) -> dict[str, JsonValue]:
    """Return the fields of a config.json. Raises a ModelError.

    factors  the numbers of the tensors `TO_CONFIG`
    """
    fields = architecture_of(metadata).fields(metadata)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.broken("tensor token_embd.weight", None, "")
    ids = {
        f"{short}_token_id": metadata.fields.get(f"{PREFIX}{name}_token_id")
        for short, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return (
        fields
        | ids
        | {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in model.tensors,
            "rope_parameters": _stretched(fields, metadata, factors),
        }
    )


def _stretched(
    fields: dict[str, JsonValue], metadata: Metadata, factors: Mapping[str, Sequence[float]]
) -> JsonValue:
    """Return the positions with the factors that tensors have for each frequency.

    transformers has such factors in its kind `longrope` alone. Where a file has one set of them, as
    for Llama 3, they count at any length.
    """
    rope, length = fields["rope_parameters"], fields["max_position_embeddings"]
    short, long = factors.get(TO_CONFIG[2]), factors.get(TO_CONFIG[1])
    if not isinstance(rope, dict) or not (factors.get(TO_CONFIG[0]) or (short and long)):
        return rope
    result: dict[str, JsonValue] = rope | {
        "rope_type": "longrope",
        "short_factor": list(short or factors[TO_CONFIG[0]]),
        "long_factor": list(long or factors[TO_CONFIG[0]]),
        "original_max_position_embeddings": fields.get("original_max_position_embeddings", length),
    }
    if not short:
        return result | {"attention_factor": 1.0}
    if metadata.has("rope.scaling.attn_factor"):
        result["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return result


def generation_fields(vocabulary: GgufVocabulary) -> dict[str, JsonValue]:
    """Return the fields of a generation_config.json: what ends a text, and how it is drawn."""
    fields = vocabulary.metadata.fields
    result: dict[str, JsonValue] = {
        name: fields[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in fields
    }
    ids: list[JsonValue] = [*vocabulary.enders()]
    return result | ({"eos_token_id": ids} if ids else {})
