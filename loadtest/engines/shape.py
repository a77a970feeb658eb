"""The 135M model for measuring speed: a Llama shape with random weights.

Speed does not depend on the weights' values.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 49_152
POSITIONS = 8192  # enough for the long prompts
SPECIAL = ("<unk>", "<s>", "</s>")


def save_135m(folder: Path) -> None:
    """Write the checkpoint, in bfloat16, and a tokenizer that any engine can load."""
    # Two seconds, which a command that writes no checkpoint does not take.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    unknown, begins, ends = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), unk_token=unknown, bos_token=begins, eos_token=ends
    )
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Tokenizer:
    """Return a tokenizer that reads text as bytes, and writes another word for each id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(VOCAB_SIZE - len(SPECIAL) - len(alphabet))]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *alphabet, *words])}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    return pieces
