"""Families with LayerNorm and a feed-forward layer without a gate."""

from penstock.worker.models.families.architecture import DecoderConfig, NormConfig
from penstock.worker.models.families.usual import attention, decoder, layers, mlp, turns, windowed
from penstock.worker.models.folder.fields import Fields


def starcoder2(fields: Fields) -> DecoderConfig:
    has_bias = fields.use_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias)
    forward = mlp(
        fields,
        activation=fields.activation(gated=False),
        up=["mlp.c_fc"],
        down="mlp.c_proj",
        bias=has_bias,
    )
    return decoder(
        fields,
        windowed(attend, forward, fields.windows(by_type=False)),
        norm=NormConfig(fields.norm_epsilon, centers=True, has_bias=True),
    )


def nemotron(fields: Fields) -> DecoderConfig:
    has_bias, rope = fields.attention_bias, turns(fields, partial=True)
    attend = attention(fields, rope=rope, qkv_bias=has_bias, output_bias=has_bias)
    forward = mlp(
        fields,
        activation=fields.activation(gated=False),
        up=["mlp.up_proj"],
        bias=fields.mlp_bias,
    )
    return decoder(
        fields,
        layers(attend, forward, fields.num_hidden_layers),
        norm=NormConfig(fields.norm_eps, centers=True, has_bias=True, adds_one=True),
    )
