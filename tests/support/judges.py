"""The judge models: small random ones in which a wrong position, block or slot changes the tokens.

Untied unless the name says so; logits spread by about 3; the end token is drawn in 1-3 % of steps.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 320
EOS = 2
_SPREAD = 3.0
_END_SHARE = 0.02
PROMPT_LENGTHS = (15, 16, 17, 31, 32, 33, 100)

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 1 / math.sqrt(256),
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Judge:
    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    settings: dict[str, object]


JUDGES = {
    "llama": Judge(LlamaForCausalLM, LlamaConfig, {}),
    "llama_llama3": Judge(LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama_yarn": Judge(LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN}),
    "llama_tied": Judge(LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biased": Judge(
        LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}
    ),
    "mistral": Judge(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_window": Judge(MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "qwen2": Judge(Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_window": Judge(
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3": Judge(Qwen3ForCausalLM, Qwen3Config, {}),
}


def build(name: str) -> PreTrainedModel:
    """The judge in float32 with eager attention, the same numbers every time."""
    judge = JUDGES[name]
    torch.manual_seed(7)
    config = judge.config.from_dict(_SHAPE | judge.settings, attn_implementation="eager")
    model: PreTrainedModel = judge.model(config).train(False)
    _sharpen(model)
    return model


def save(name: str, path: Path, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Write the judge's folder, and return the model."""
    model = build(name)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def _sharpen(model: PreTrainedModel) -> None:
    """Norms and biases away from their neutral start, logits spread by 3, an end now and then."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(0.75 + 0.5 * torch.rand(parameter.shape, generator=generator))
        elif name.endswith(".bias"):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    head = model.state_dict()["lm_head.weight"]
    head.mul_(_SPREAD / _scores(model).std())
    # The row that is drawn about as often as wanted becomes the end token's.
    drawn = _scores(model).softmax(-1).mean(0)
    swapped = int((drawn[3:] - _END_SHARE).abs().argmin()) + 3
    head[[EOS, swapped]] = head[[swapped, EOS]]


def _scores(model: PreTrainedModel) -> Tensor:
    """Logits after every token of the judges' prompts, [tokens, vocab]."""
    prompts = [torch.tensor([prompt(length)]) for length in PROMPT_LENGTHS]
    return torch.cat([model(ids).logits[0] for ids in prompts])
