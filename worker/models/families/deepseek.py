"""DeepSeek V2 and V3: latent attention, and experts of which some are shared."""

import math
from dataclasses import replace

from penstock.worker.models.architecture import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
)
from penstock.worker.models.families.experts import checked, grouped
from penstock.worker.models.families.usual import decoder
from penstock.worker.models.fields import Fields
from penstock.worker.models.rope import rope


def deepseek_v2(fields: Fields) -> DecoderConfig:
    attend = _attention(fields, interleaved=True)
    forwards = []
    for each in grouped(fields):
        if isinstance(each, ExpertsConfig):
            ways = {"greedy": (1, 1), "group_limited_greedy": (fields.n_group, fields.topk_group)}
            choice = replace(each.choice, scoring="softmax", of_best=1, normalises=False)
            choice = checked(replace(choice, groups=ways[fields.topk_method]))
            each = replace(each, choice=choice, router_bias=None)
        forwards.append(each)
    return decoder(fields, [LayerConfig(attend, each) for each in forwards])


def deepseek_v3(fields: Fields) -> DecoderConfig:
    attend = _attention(fields, interleaved=fields.rope_interleave)
    layers = [LayerConfig(attend, each) for each in grouped(fields)]
    return decoder(fields, layers, unread_layers=fields.count("num_mtp_layers", least=0))


def _attention(fields: Fields, *, interleaved: bool) -> LatentConfig:
    still, turned = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    parameters = fields.rope_parameters
    scale: float = (still + turned) ** -0.5
    if (longer := parameters.get("mscale_all_dim")) and parameters["rope_type"] != "default":
        scale *= (0.1 * longer * math.log(parameters["factor"]) + 1.0) ** 2
    return LatentConfig(
        fields.num_attention_heads,
        fields.count("kv_lora_rank"),
        fields.q_lora_rank,
        still,
        turned,
        fields.count("v_head_dim"),
        scale,
        rope(fields.hf, turned, interleaved=interleaved),
        fields.attention_bias,
    )
