"""The tokenizer: byte-level BPE in which a name is the same tokens wherever it stands."""

import json
from collections.abc import Iterable
from pathlib import Path
from shutil import copyfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from penstock.worker.bundled.training.rendering import BOS, END, END_OF_TEXT, START

VOCAB_SIZE = 4096

_CONTROL = (END_OF_TEXT, BOS, START, END)
# These are single tokens and yet part of the text: a tool parser must see them.
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A space joins the lower-case word after it, but neither a capital nor a digit: a small model then
# copies names and numbers into JSON token by token. Digits stand alone.
_PIECES = (
    r" ?\p{Ll}[\p{L}\p{M}]*|\p{L}[\p{L}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s"
)
_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": END,
    "pad_token": END_OF_TEXT,
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, normalized=False) for token in (*_CONTROL, *_MARKS)],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos]
    )
    return _with_visible_marks(tokenizer)


def _with_visible_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with only the control tokens special.

    Training makes all added tokens special, and marks must outlive `skip_special_tokens`.
    """
    parts = json.loads(tokenizer.to_str())
    for token in parts["added_tokens"]:
        token["special"] = token["content"] in _CONTROL
    return Tokenizer.from_str(json.dumps(parts))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which every version of `AutoTokenizer` makes a fast tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    copyfile(_TEMPLATE, folder / _TEMPLATE.name)
