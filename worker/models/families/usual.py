"""The parts that most families have, with the fields that most configurations have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.worker.models.families.architecture import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from penstock.worker.models.families.rope import Rope, rope
from penstock.worker.models.folder.fields import Fields

FeedForward = MLPConfig | ExpertsConfig


def turns(fields: Fields, **more: Any) -> Rope:
    """Return the rotations of a head, as `rope` does with `more`."""
    return rope(fields.hf, fields.shape().head_dim, **more)


def attention(fields: Fields, **more: Any) -> AttentionConfig:
    """Return Llama's attention, with `more` of `AttentionConfig`'s fields."""
    shape = fields.shape()
    usual: dict[str, Any] = {"shape": shape, "scale": shape.head_dim**-0.5}
    if "rope" not in more:
        usual["rope"] = turns(fields)
    return AttentionConfig(**usual | more)


def mlp(fields: Fields, **more: Any) -> MLPConfig:
    """Return Llama's feed-forward layer, with `more` of `MLPConfig`'s fields."""
    usual: dict[str, Any] = {"intermediate_size": fields.intermediate_size}
    if "activation" not in more:
        usual["activation"] = fields.activation()
    return MLPConfig(**usual | more)


def layers(
    attention: AttentionConfig, mlp: FeedForward, num: int, **more: Any
) -> list[LayerConfig]:
    """Return layers all alike, with `more` of `LayerConfig`'s fields."""
    return [LayerConfig(attention, mlp, **more)] * num


def windowed(
    attention: AttentionConfig, mlp: FeedForward, windows: Sequence[int | None], **more: Any
) -> list[LayerConfig]:
    """Return layers that differ by their windows alone, with `more` of `LayerConfig`'s fields."""
    return [LayerConfig(replace(attention, window=window), mlp, **more) for window in windows]


def decoder(fields: Fields, layers: Sequence[LayerConfig], **more: Any) -> DecoderConfig:
    """Return a decoder with Llama's norms, with `more` of `DecoderConfig`'s fields."""
    usual: dict[str, Any] = {"layers": layers}
    if "norm" not in more:
        usual["norm"] = NormConfig(fields.rms_norm_eps)
    return DecoderConfig(**usual | more)
