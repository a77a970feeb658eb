"""Families with a mixture of experts (MoE): Mixtral's, Qwen's, OLMo's, GLM's and gpt-oss."""

from dataclasses import replace
from typing import Any

from penstock.worker.layers.experts import ExpertChoice
from penstock.worker.layers.mlp import LIMIT, SWISH
from penstock.worker.models.families.architecture import (
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
)
from penstock.worker.models.families.usual import (
    FeedForward,
    attention,
    decoder,
    layers,
    mlp,
    turns,
    windowed,
)
from penstock.worker.models.folder.errors import UnsupportedField
from penstock.worker.models.folder.fields import Fields

_NAMES: dict[str, Any] = {
    "up": ["mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"],
    "down": "mlp.experts.{}.down_proj",
}


def mixtral(fields: Fields) -> DecoderConfig:
    expert = mlp(
        fields,
        up=["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
        down="block_sparse_moe.experts.{}.w2",
    )
    choice = checked(ExpertChoice(fields.num_local_experts, fields.num_experts_per_tok))
    forward = ExpertsConfig(choice, expert, router="block_sparse_moe.gate")
    return decoder(fields, windowed(attention(fields), forward, fields.windows(by_type=False)))


def olmoe(fields: Fields) -> DecoderConfig:
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias, head_norm="rows")
    forward = ExpertsConfig(_choice(fields), mlp(fields, **_NAMES))
    return decoder(fields, layers(attend, forward, fields.num_hidden_layers))


def qwen2_moe(fields: Fields) -> DecoderConfig:
    """Return a decoder with an expert that every token goes through, by a share of its own."""
    shared_mlp = mlp(
        fields,
        intermediate_size=fields.count("shared_expert_intermediate_size"),
        up=["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
        down="mlp.shared_expert.down_proj",
    )
    attend = attention(fields, qkv_bias=fields.qkv_bias)
    more: dict[str, Any] = {"shared_mlp": shared_mlp, "shared_gate": "mlp.shared_expert_gate"}
    windows = fields.windows()
    return decoder(
        fields,
        [
            LayerConfig(replace(attend, window=window), forward)
            for window, forward in zip(windows, _qwen(fields, **more), strict=True)
        ],
    )


def qwen3_moe(fields: Fields) -> DecoderConfig:
    has_bias = fields.attention_bias
    attend = attention(fields, qkv_bias=has_bias, output_bias=has_bias, head_norm="heads")
    windows = fields.windows(by_type=False)
    return decoder(
        fields,
        [
            LayerConfig(replace(attend, window=window), forward)
            for window, forward in zip(windows, _qwen(fields), strict=True)
        ],
    )


def glm4_moe(fields: Fields) -> DecoderConfig:
    attend = attention(
        fields,
        rope=turns(fields, partial=True),
        qkv_bias=fields.attention_bias,
        head_norm="heads" if fields.use_qk_norm else None,
    )
    forwards = after_dense(fields, by_groups(fields), has_bias=True)
    layers = [LayerConfig(attend, ffn) for ffn in forwards]
    return decoder(fields, layers, unread_layers=fields.count("num_mtp_layers", least=0))


def gpt_oss(fields: Fields) -> DecoderConfig:
    """Return a decoder with sinks, and experts that have biases and a clamped activation."""
    has_bias = bool(fields.attention_bias)
    attend = attention(fields, sinks="self_attn.sinks", qkv_bias=has_bias, output_bias=has_bias)
    for field, value in (("swiglu_limit", LIMIT), ("swiglu_alpha", SWISH)):
        if getattr(fields, field) != value:
            raise UnsupportedField(field, getattr(fields, field), str(value))
    expert = mlp(
        fields,
        activation="clamped_mul",
        up=["mlp.experts.{}.gate_up_proj"],
        down="mlp.experts.{}.down_proj",
        bias=True,
        interleaved=True,
    )
    choice = checked(ExpertChoice(fields.num_local_experts, fields.num_experts_per_tok))
    forward = ExpertsConfig(choice, expert, router="mlp.router", router_bias=True)
    return decoder(fields, windowed(attend, forward, fields.windows()))


def by_groups(fields: Fields) -> ExpertChoice:
    """Return DeepSeek-V3's choice: among the groups whose two best experts are best."""
    return checked(
        ExpertChoice(
            fields.n_routed_experts,
            fields.num_experts_per_tok,
            scoring="sigmoid",
            groups=(fields.count("n_group"), fields.count("topk_group")),
            of_best=2,
            normalises=fields.norm_topk_prob,
            factor=fields.routed_scaling_factor,
        )
    )


def after_dense(
    fields: Fields, choice: ExpertChoice, *, has_bias: bool = False
) -> list[FeedForward]:
    """Return DeepSeek's feed-forward layers: the first ones dense, the others with experts.

    has_bias  the choice has a bias
    """
    inner, shared_mlp = fields.count("moe_intermediate_size"), None
    if num_shared := fields.count("n_shared_experts", least=0):
        shared_mlp = mlp(
            fields,
            intermediate_size=inner * num_shared,
            up=["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
            down="mlp.shared_experts.down_proj",
        )
    sparse = ExpertsConfig(
        choice,
        mlp(fields, intermediate_size=inner, **_NAMES),
        choice_bias="mlp.gate.e_score_correction_bias" if has_bias else None,
        shared_mlp=shared_mlp,
    )
    plain, num_dense = mlp(fields), fields.count("first_k_dense_replace", least=0)
    return [plain if index < num_dense else sparse for index in range(fields.num_hidden_layers)]


def _qwen(fields: Fields, **more: Any) -> list[FeedForward]:
    expert = mlp(fields, intermediate_size=fields.count("moe_intermediate_size"), **_NAMES)
    sparse, plain = ExpertsConfig(_choice(fields), expert, **more), mlp(fields)
    dense, step = fields.mlp_only_layers, fields.decoder_sparse_step
    return [
        plain if index in dense or (index + 1) % step else sparse
        for index in range(fields.num_hidden_layers)
    ]


def _choice(fields: Fields) -> ExpertChoice:
    num_chosen, normalises = fields.num_experts_per_tok, fields.norm_topk_prob
    return checked(ExpertChoice(fields.num_experts, num_chosen, normalises=normalises))


def checked(choice: ExpertChoice) -> ExpertChoice:
    num, (groups, chosen_groups) = choice.num_experts, choice.groups
    if not 0 < chosen_groups <= groups or num % groups or num // groups < choice.of_best:
        expected = f"equal groups of {num} experts, from some of which are chosen"
        raise UnsupportedField("n_group and topk_group", choice.groups, expected)
    most = num // groups * chosen_groups
    if not 0 < choice.num_chosen <= most:
        expected = f"1 to {most} of {num} experts"
        raise UnsupportedField("num_experts_per_tok", choice.num_chosen, expected)
    return choice
