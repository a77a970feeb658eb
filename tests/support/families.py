"""Tiny models of any family that transformers has, and how far the engine is from transformers.

Their numbers are random, and such that a wrong position, window or block changes the logits.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.build import build_engine
from penstock.worker.engine.engine import Engine
from penstock.worker.engine.io.config import EngineConfig
from penstock.worker.engine.io.messages import AddSequence, Logprob, Stats

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 320
# Of log probabilities. With states, transformers' own modules are as far from themselves when they
# read token by token.
TOLERANCE, STATEFUL_TOLERANCE = 1e-4, 5e-4
WINDOW = 20  # of families that have one: shorter than the prompts
_MOST_PARAMETERS = 30e6

_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Given where a family's configuration has such a field.
_MORE: dict[str, object] = {
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "d_model": 64,
    "n_layers": 4,
    "n_heads": 4,
    "max_seq_len": 512,
    "rotary_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "attention_multiplier": 0.25,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "rotary_pct": 0.5,
    "layer_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1, 3],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "block_types": ["recurrent", "attention"],
    "lru_width": 64,
}


# Given where a family's usual configuration leaves out what its checkpoints have.
_AS_SHIPPED: dict[str, dict[str, object]] = {
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Of a part that no text reaches.
_UNSEEN: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "mm_tokens_per_image": 4,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "n_layers": 1,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_embeddings": 16,
    "hidden_dim": 32,
    "num_layers": 1,
    "dim_head": 16,
}
# What transformers' writer makes of names that its reader, and who published them, have otherwise.
_MISSPELT = {
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
    "qianfan_ocr": ("language_model.model.encoder.layers.", "language_model.model.layers."),
}
_MROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}


def _loader(config: Any) -> Any:
    is_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_text else AutoModelForMultimodalLM


def usual(family: str) -> Any:
    """The family's configuration in its usual size."""
    return CONFIG_MAPPING[family](**_AS_SHIPPED.get(family, {}))


def tiny(family: str) -> Any:
    """A configuration of the family with less than some million parameters."""
    kind, large = CONFIG_MAPPING[family], usual(family)
    known = large.to_dict().keys() | kind.attribute_map.keys()
    fields = _SHAPE | {name: value for name, value in _MORE.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention: as many key heads, of their own size
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if "text_config" in kind.sub_configs:
        return _wrapped(kind, large)
    name = kind.attribute_map.get("layer_types", "layer_types")
    is_computed = isinstance(getattr(kind, name, None), property)
    kinds = getattr(large, "layer_types", None)
    if kinds and not is_computed and "layer_types" in known:
        fields[name] = (list(dict.fromkeys(kinds)) * 4)[:4]
    if family == "zaya":
        fields["num_experts_per_tok"] = 1
    return kind(**fields)


def _wrapped(kind: Any, large: Any) -> Any:
    """A configuration with a text model inside, and others of which nothing is asked."""
    parts = {}
    for name in kind.sub_configs:
        part = getattr(large, name)
        if name == "text_config":
            parts[name] = tiny(part.model_type).to_dict()
            if "mrope_section" in getattr(part, "ignore_keys_at_rope_validation", ()) or (
                part.model_type == "paddleocr_vl_text"
            ):
                rope = _MROPE | (parts[name].get("rope_parameters") or {})
                is_half = rope.get("partial_rotary_factor") == 0.5
                section = [1, 1, 2] if is_half else [2, 3, 3]
                parts[name]["rope_parameters"] = rope | {"mrope_section": section}
        elif part is not None:
            known = part.to_dict().keys()
            parts[name] = {each: value for each, value in _UNSEEN.items() if each in known}
    return kind(**parts)


def save(family: str, path: Path, **fields: object) -> None:
    """Write the folder of a tiny model, with some fields of its own.

    Raises ValueError for a family that has none so small.
    """
    config = tiny(family)
    config.update(fields)
    with torch.device("meta"):
        size = sum(each.numel() for each in _loader(config).from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(7)
    model = _loader(config).from_config(config).float()
    draw(model)
    model.save_pretrained(path)
    if family in _MISSPELT:
        renamed(path, *_MISSPELT[family])


def renamed(folder: Path, old: str, new: str) -> None:
    """Let tensors whose names hold `old` have `new` there."""
    file = folder / "model.safetensors"
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@torch.no_grad()
def draw(model: Any) -> None:
    """Away from the neutral start: norms near one (or zero, where one is added), some biases."""
    generator = torch.Generator().manual_seed(11)
    for name, each in model.named_parameters():
        if each.ndim >= 2:
            drawn = torch.randn(each.shape, generator=generator) / math.sqrt(each.shape[-1])
        elif name.endswith("bias") or "sink" in name:
            drawn = 0.5 * torch.randn(each.shape, generator=generator)
        else:
            drawn = each + 0.5 * torch.rand(each.shape, generator=generator) - 0.25
        each.copy_(drawn)


def prompts() -> list[list[int]]:
    """Five, the last three with a beginning in common."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, VOCAB, (5, 70), generator=generator).tolist()
    return [drawn[0][:15], drawn[1][:33], *(drawn[2][:40] + each[:7] for each in drawn[2:])]


class Played:
    """What an engine made of the prompts, with slices, prefix hits and preemptions."""

    def __init__(self, path: Path, **settings: Any) -> None:
        given = {"dtype": "float32", "max_num_batched_tokens": 13, "num_gpu_blocks_override": 9}
        self.engine: Engine = build_engine(
            EngineConfig(model=path, **given | {"max_model_len": 128} | settings)
        )
        self.made: dict[str, list[Logprob]] = {}
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=20)
        asked = prompts()
        for number, prompt in enumerate(asked):
            if number == 3:
                self._run()  # the first of those with a common beginning is cached now
            self.made[str(number)] = []
            self.engine.add(AddSequence(str(number), prompt, params))
        self._run()
        self.sequences = [
            prompt + [each.token_id for each in self.made[str(number)]]
            for number, prompt in enumerate(asked)
        ]

    @property
    def stats(self) -> Stats:
        return self.engine.stats()

    def _run(self) -> None:
        while self.engine.busy:
            for output in self.engine.step():
                assert output.error is None, output.error
                self.made[output.seq_id] += output.logprobs or []

    @property
    def tolerance(self) -> float:
        facts = self.engine.runner.model.config  # type: ignore[attr-defined]
        return STATEFUL_TOLERANCE if facts.state_bytes else TOLERANCE

    def distance(self, path: Path) -> float:
        """The largest difference from transformers' log probabilities, in float32 and eager."""
        wanted = logprobs_of(path, self.sequences)
        found = 0.0
        for number, prompt in enumerate(prompts()):
            for at, drawn in enumerate(self.made[str(number)], len(prompt) - 1):
                row = wanted[number][at]
                told = torch.tensor([drawn.logprob, *drawn.top_logprobs])
                places = torch.tensor([drawn.token_id, *drawn.top_ids])
                found = max(found, float((row[places] - told).abs().max()))
        return found


@torch.inference_mode()
def logprobs_of(path: Path, sequences: Sequence[list[int]]) -> list[Tensor]:
    model = _loader(AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    rows = [model(input_ids=torch.tensor([each]), use_cache=False).logits[0] for each in sequences]
    return [each.float().log_softmax(-1) for each in rows]
