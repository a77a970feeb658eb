"""DeepSeek V2 and V3: latent attention (MLA), and experts (MoE) of which some are shared."""

import math

from penstock.worker.layers.experts import ExpertChoice
from penstock.worker.models.families.architecture import DecoderConfig, LatentConfig, LayerConfig
from penstock.worker.models.families.experts import after_dense, by_groups, checked
from penstock.worker.models.families.rope import rope
from penstock.worker.models.families.usual import decoder
from penstock.worker.models.folder.errors import UnsupportedField
from penstock.worker.models.folder.fields import Fields


def deepseek_v2(fields: Fields) -> DecoderConfig:
    groups = (1, 1)
    if fields.topk_method != "greedy":
        if fields.topk_method != "group_limited_greedy":
            expected = "greedy and group_limited_greedy"
            raise UnsupportedField("topk_method", fields.topk_method, expected)
        groups = fields.count("n_group"), fields.count("topk_group")
    choice = checked(
        ExpertChoice(
            fields.n_routed_experts,
            fields.num_experts_per_tok,
            groups=groups,
            normalises=False,
            factor=fields.routed_scaling_factor,
        )
    )
    attend = _attention(fields, interleaved=True)
    return decoder(fields, [LayerConfig(attend, ffn) for ffn in after_dense(fields, choice)])


def deepseek_v3(fields: Fields) -> DecoderConfig:
    attend = _attention(fields, interleaved=fields.rope_interleave)
    choice = by_groups(fields)
    layers = [LayerConfig(attend, ffn) for ffn in after_dense(fields, choice, has_bias=True)]
    return decoder(fields, layers, unread_layers=fields.count("num_mtp_layers", least=0))


def _attention(fields: Fields, *, interleaved: bool) -> LatentConfig:
    still, rope_dim = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    parameters = fields.rope_parameters
    scale: float = (still + rope_dim) ** -0.5
    if (longer := parameters.get("mscale_all_dim")) and parameters["rope_type"] != "default":
        scale *= (0.1 * longer * math.log(parameters["factor"]) + 1.0) ** 2
    return LatentConfig(
        fields.num_attention_heads,
        fields.count("kv_lora_rank"),
        None if fields.q_lora_rank is None else fields.count("q_lora_rank"),
        still,
        rope_dim,
        fields.count("v_head_dim"),
        scale,
        rope(fields.hf, rope_dim, interleaved=interleaved),
        fields.attention_bias,
    )
