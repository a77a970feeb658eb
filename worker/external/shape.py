"""The figures of a model that are needed where another engine computes it."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from penstock.worker.models.folder.files import read_object
from penstock.worker.process.loading import loading


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of one checkpoint. `max_model_len` is None where its configuration has none."""

    vocab_size: int
    max_model_len: int | None
    eos_token_ids: frozenset[int]


def model_shape(folder: Path) -> ModelShape:
    """Return the figures from a folder's config.json, of any architecture. Raises InvalidJob."""
    with loading(str(folder)):
        config = read_object(folder / "config.json")
        generation = folder / "generation_config.json"
        defaults = read_object(generation) if generation.exists() else {}
        inner = config.get("text_config")
        fields = config | inner if isinstance(inner, dict) else config
        vocab_size, length = fields.get("vocab_size"), fields.get("max_position_embeddings")
        if not isinstance(vocab_size, int):
            raise ValueError(f"config.json: vocab_size is {vocab_size!r}; it must be a number")
        enders = _ids(defaults.get("eos_token_id")) or _ids(fields.get("eos_token_id"))
        if not enders:
            raise ValueError("config.json: eos_token_id is missing; say which token ends a text")
        return ModelShape(vocab_size, length if isinstance(length, int) else None, enders)


def _ids(value: JsonValue) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in values if isinstance(token_id, int))
