"""Gemma: norms whose weights are stored less 1, a scaled embedding; later norms on both sides."""

from dataclasses import replace

from penstock.worker.models.families.architecture import (
    DecoderConfig,
    LayerConfig,
    NormConfig,
    NormNames,
)
from penstock.worker.models.families.usual import attention, decoder, layers, mlp, turns, windowed
from penstock.worker.models.folder.fields import Fields

_NORMS = NormNames(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)


def gemma(fields: Fields) -> DecoderConfig:
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    return decoder(
        fields,
        layers(attend, mlp(fields), fields.num_hidden_layers),
        norm=NormConfig(fields.rms_norm_eps, adds_one=True),
        embedding_factor=fields.hidden_size**0.5,
    )


def gemma2(fields: Fields) -> DecoderConfig:
    has_bias = fields.attention_bias
    attend = attention(
        fields,
        scale=fields.query_pre_attn_scalar**-0.5,
        softcap=fields.attn_logit_softcapping,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    forward = mlp(fields, activation=fields.activation("hidden_activation"))
    return decoder(
        fields,
        windowed(attend, forward, fields.windows(), norms=_NORMS),
        norm=NormConfig(fields.rms_norm_eps, adds_one=True),
        embedding_factor=fields.hidden_size**0.5,
        logits_softcap=fields.final_logit_softcapping,
    )


def gemma3_text(fields: Fields) -> DecoderConfig:
    """Return a decoder whose layers with a window are turned otherwise than those without."""
    has_bias, kinds = fields.attention_bias, fields.layer_types
    ropes = {kind: turns(fields, layer_type=kind) for kind in sorted(set(kinds))}
    attend = attention(
        fields,
        scale=fields.query_pre_attn_scalar**-0.5,
        rope=None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        head_norm="heads",
    )
    forward = mlp(fields, activation=fields.activation("hidden_activation"))
    return decoder(
        fields,
        [
            LayerConfig(replace(attend, rope=ropes[kind], window=window), forward, _NORMS)
            for kind, window in zip(kinds, fields.windows(), strict=True)
        ],
        norm=NormConfig(fields.rms_norm_eps, adds_one=True),
        embedding_factor=fields.hidden_size**0.5,
        logits_softcap=fields.final_logit_softcapping,
    )
