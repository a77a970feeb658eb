"""The models for measuring speed: shapes of published ones with random weights.

Speed does not depend on the weights' values.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

POSITIONS = 8192  # enough for the long prompts
SPECIAL = ("<unk>", "<s>", "</s>")
_COMMON: dict[str, Any] = {
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_SMALL = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
# By name: the family, and what its config.json says.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("llama", _SMALL | {"num_hidden_layers": 30, "intermediate_size": 1536}),
    "1.1b": (
        "llama",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 5632,
            "vocab_size": 32_000,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "64-experts": (
        "qwen3_moe",
        _SMALL
        | {
            "num_hidden_layers": 12,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 192,
            "intermediate_size": 1536,
        },
    ),
}


def save_shape(name: str, folder: Path) -> None:
    """Write the checkpoint, in bfloat16, and a tokenizer that any engine can load."""
    # Two seconds, which a command that writes no checkpoint does not take.
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    family, shape = SHAPES[name]
    config = CONFIG_MAPPING[family](**_COMMON | shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    unk, begins, ends = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(shape["vocab_size"]),
        unk_token=unk,
        bos_token=begins,
        eos_token=ends,
    )
    tokenizer.save_pretrained(folder)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer that reads text as bytes, and writes another word for each id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab_size - len(SPECIAL) - len(alphabet))]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *alphabet, *words])}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    return pieces
