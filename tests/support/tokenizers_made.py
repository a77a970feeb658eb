"""Tokenizers of every kind that models use, made here: small, and odd where it hurts."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.text.model_tokenizer import ModelTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't here; it's there!",
    "Grüße aus Köln, naïve café; 日本語のテキスト。 Ελληνικά, русский, العربية",
    "emoji: 👩‍🚀🚀🎉 and maths: ∑ x² ≤ ∞, tabs\tand\nlines\n\n  and spaces",
    '{"name": "Ada", "age": 36, "tags": ["a", "b"]}',
]
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]  # ids as the judges have them
EOS = 2
TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if shout is defined %}{{ shout | upper }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; some added tokens are not special, one has a space.

    320 tokens, as the judge models have.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=318,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(
        [AddedToken("two words", normalized=False), AddedToken("né€", normalized=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: metaspace words, and bytes for what has no word."""
    words = ["▁the", "▁fox", "▁", "fo", "x", "a", "b", "c", "é", "日", "�", "▁▁", "<0x", "🚀"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """The same as newer conversions write it: only the first word of a text is given a space."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def metaspace() -> Tokenizer:
    """A unigram model, as T5 has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=["<unk>", *SPECIAL],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT has it: the decoder puts spaces and takes some away again."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False
        ),
    )
    tokenizer.add_tokens([" 's", "x do not", "##", " ."])
    return tokenizer


def suffixed() -> Tokenizer:
    """As the first GPT had it: a suffix ends a word."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=200,
            special_tokens=SPECIAL,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    return tokenizer


def unadorned() -> Tokenizer:
    """No decoder at all: pieces are joined by spaces."""
    tokenizer = byte_level()
    tokenizer.decoder = None
    return tokenizer


def stripping() -> Tokenizer:
    """Strips before and after the pieces are one, and replaces by a pattern."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("▁+"), " "),
            decoders.Strip("x", 1, 0),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 2, 0),
        ]
    )
    return tokenizer


MAKERS = (
    byte_level,
    byte_fallback,
    metaspace_first,
    metaspace,
    wordpiece,
    suffixed,
    unadorned,
    stripping,
)


def save(tokenizer: Tokenizer, folder: Path, template: str | None = TEMPLATE) -> Path:
    """A model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@cache
def folder(name: str) -> Path:
    """The folder of a maker's tokenizer, or of the bundled model's, written once."""
    if name == "bundled":
        return BUNDLED_MODEL
    made = globals()[name]()
    return save(made, Path(mkdtemp(prefix=f"penstock-{name}-")))


@cache
def text(name: str) -> ModelTokenizer:
    return ModelTokenizer(folder(name))
