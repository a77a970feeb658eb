"""Cohere's Command: attention and the feed-forward layer read the same rows."""

from dataclasses import replace

from penstock.worker.models.families.architecture import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    NormConfig,
    NormNames,
)
from penstock.worker.models.families.usual import attention, decoder, mlp, turns
from penstock.worker.models.folder.errors import UnsupportedField
from penstock.worker.models.folder.fields import Fields


def cohere(fields: Fields) -> DecoderConfig:
    if fields.use_qk_norm:
        raise UnsupportedField("use_qk_norm", True, "models without it")
    return _decoder(fields, [_attention(fields)] * fields.num_hidden_layers)


def cohere2(fields: Fields) -> DecoderConfig:
    """Return a decoder whose layers without a window know no positions."""
    attend = _attention(fields)
    return _decoder(
        fields,
        [
            replace(attend, rope=attend.rope if window else None, window=window)
            for window in fields.windows()
        ],
    )


def _attention(fields: Fields) -> AttentionConfig:
    has_bias = fields.attention_bias
    rope = turns(fields, interleaved=True)
    return attention(fields, rope=rope, qkv_bias=has_bias, output_bias=has_bias)


def _decoder(fields: Fields, attends: list[AttentionConfig]) -> DecoderConfig:
    norms, forward = NormNames(mlp_in=None), mlp(fields)
    return decoder(
        fields,
        [LayerConfig(attend, forward, norms, is_parallel=True) for attend in attends],
        norm=NormConfig(fields.layer_norm_eps, centers=True),
        logits_factor=fields.logit_scale,
    )
