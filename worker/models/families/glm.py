"""GLM: RoPE on half of a head, interleaved; GLM-4 has norms on both sides."""

from penstock.worker.models.families.architecture import (
    AttentionConfig,
    DecoderConfig,
    MLPConfig,
    NormNames,
)
from penstock.worker.models.families.usual import attention, decoder, layers, mlp, turns
from penstock.worker.models.folder.fields import Fields

_NORMS = NormNames(
    attention_out="post_self_attn_layernorm",
    mlp_in="post_attention_layernorm",
    mlp_out="post_mlp_layernorm",
)


def glm(fields: Fields) -> DecoderConfig:
    return decoder(fields, layers(*_parts(fields), fields.num_hidden_layers))


def glm4(fields: Fields) -> DecoderConfig:
    return decoder(fields, layers(*_parts(fields), fields.num_hidden_layers, norms=_NORMS))


def _parts(fields: Fields) -> tuple[AttentionConfig, MLPConfig]:
    rope = turns(fields, interleaved=True, partial=True)
    attend = attention(fields, rope=rope, qkv_bias=fields.attention_bias)
    return attend, mlp(fields, up=["mlp.gate_up_proj"])
