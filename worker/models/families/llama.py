"""Llama, and families that have its layers with other biases, activations or positions."""

from dataclasses import replace

from penstock.worker.models.families.architecture import DecoderConfig, LayerConfig
from penstock.worker.models.families.usual import attention, decoder, layers, mlp, turns, windowed
from penstock.worker.models.folder.fields import Fields


def llama(fields: Fields) -> DecoderConfig:
    has_bias = bool(fields.attention_bias)
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    forward = mlp(fields, bias=bool(fields.mlp_bias))
    return decoder(fields, layers(attend, forward, fields.num_hidden_layers))


def seed_oss(fields: Fields) -> DecoderConfig:
    biases = {"qkv_bias": fields.attention_bias, "output_bias": fields.attention_out_bias}
    forward = mlp(fields, bias=fields.mlp_bias)
    return decoder(fields, layers(attention(fields, **biases), forward, fields.num_hidden_layers))


def arcee(fields: Fields) -> DecoderConfig:
    """Return a decoder whose feed-forward layers have no gate."""
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    activation = fields.activation(gated=False)
    forward = mlp(fields, activation=activation, up=["mlp.up_proj"], bias=fields.mlp_bias)
    return decoder(fields, layers(attend, forward, fields.num_hidden_layers))


def ernie4_5(fields: Fields) -> DecoderConfig:
    has_bias, rope = fields.use_bias, turns(fields, interleaved=True)
    attend = attention(fields, rope=rope, qkv_bias=has_bias, output_bias=has_bias)
    return decoder(fields, layers(attend, mlp(fields, bias=has_bias), fields.num_hidden_layers))


def smollm3(fields: Fields) -> DecoderConfig:
    """Return a decoder with layers that know no positions."""
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    forward = mlp(fields, bias=fields.mlp_bias)
    return decoder(
        fields,
        [
            LayerConfig(
                replace(attend, rope=attend.rope if turns else None, window=window), forward
            )
            for turns, window in zip(fields.no_rope_layers, fields.windows(), strict=True)
        ],
    )


def granite(fields: Fields) -> DecoderConfig:
    has_bias, num = fields.attention_bias, fields.num_hidden_layers
    scale = fields.attention_multiplier
    attend = attention(fields, scale=scale, qkv_bias=has_bias, output_bias=has_bias)
    forward = mlp(fields, bias=fields.mlp_bias)
    return decoder(
        fields,
        layers(attend, forward, num, residual_factor=fields.residual_multiplier),
        embedding_factor=fields.embedding_multiplier,
        logits_factor=1 / fields.logits_scaling,
    )


def phi3(fields: Fields) -> DecoderConfig:
    """Return a decoder whose queries, keys and values are one module, as are gate and up."""
    rope = turns(fields, partial=True)
    attend = attention(fields, rope=rope, qkv=["self_attn.qkv_proj"])
    forward = mlp(fields, up=["mlp.gate_up_proj"])
    return decoder(fields, windowed(attend, forward, fields.windows(by_type=False)))


def mistral(fields: Fields) -> DecoderConfig:
    return decoder(fields, windowed(attention(fields), mlp(fields), fields.windows(by_type=False)))


def ministral(fields: Fields) -> DecoderConfig:
    return decoder(fields, windowed(attention(fields), mlp(fields), fields.windows()))


def qwen2(fields: Fields) -> DecoderConfig:
    attend = attention(fields, qkv_bias=True)
    return decoder(fields, windowed(attend, mlp(fields), fields.windows()))


def qwen3(fields: Fields) -> DecoderConfig:
    has_bias = bool(fields.attention_bias)
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias, head_norm="heads")
    return decoder(fields, windowed(attend, mlp(fields), fields.windows()))
