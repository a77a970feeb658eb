"""OLMo 2 and 3, and EXAONE 4: norms after each part, and of queries and keys."""

from dataclasses import replace

from penstock.worker.models.families.architecture import DecoderConfig, LayerConfig, NormNames
from penstock.worker.models.families.usual import attention, decoder, layers, mlp, turns
from penstock.worker.models.folder.fields import Fields

_NORMS = NormNames(
    attention_in=None,
    attention_out="post_attention_layernorm",
    mlp_in=None,
    mlp_out="post_feedforward_layernorm",
)


def olmo2(fields: Fields) -> DecoderConfig:
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias, head_norm="rows")
    return decoder(fields, layers(attend, mlp(fields), fields.num_hidden_layers, norms=_NORMS))


def olmo3(fields: Fields) -> DecoderConfig:
    """Return a decoder whose layers with a window are turned otherwise than those without."""
    has_bias, kinds = fields.attention_bias, fields.layer_types
    ropes = {kind: turns(fields, layer_type=kind) for kind in sorted(set(kinds))}
    attend = attention(fields, rope=None, qkv_bias=has_bias, output_bias=has_bias, head_norm="rows")
    return decoder(
        fields,
        [
            LayerConfig(replace(attend, rope=ropes[kind], window=window), mlp(fields), _NORMS)
            for kind, window in zip(kinds, fields.windows(), strict=True)
        ],
    )


def exaone4(fields: Fields) -> DecoderConfig:
    """Return a decoder in which, if some layers have a window, the others know no positions."""
    attend, every = attention(fields, head_norm="heads"), fields.sliding_window is None
    return decoder(
        fields,
        [
            LayerConfig(
                replace(attend, rope=attend.rope if every or window else None, window=window),
                mlp(fields),
                _NORMS,
            )
            for window in fields.windows()
        ],
    )
