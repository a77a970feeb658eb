"""A GGUF file's tokenizer as Hugging Face's tokenizer.json.

Two kinds are read: pairs of bytes (BPE, `gpt2`) and SentencePiece's (`llama`), whose merges follow
from the scores. What llama.cpp does is the rule where a model's first tokenizer did otherwise.
"""

from collections.abc import Callable, Iterator, Mapping

from pydantic import JsonValue
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.worker.models.folder.errors import UnsupportedModel, is_failure, reason
from penstock.worker.models.folder.gguf.metadata import Metadata
from penstock.worker.models.folder.gguf.splits import SPLITS
from penstock.worker.models.folder.gguf.vocabulary import (
    CONTROL,
    NO_TOKEN,
    NORMAL,
    PREFIX,
    USER_DEFINED,
    GgufVocabulary,
)

_WHOLE = (NO_TOKEN, CONTROL, USER_DEFINED)  # types of tokens that no text is cut within
_SPACE = "▁"


def tokenizer_of(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer. Raises a ModelError that names what is not read."""
    kinds: Mapping[str, Callable[[GgufVocabulary], Tokenizer]] = {
        "gpt2": _byte_pairs,
        "llama": _sentence_piece,
    }
    file, kind = vocabulary.metadata.file, vocabulary.kind
    if kind not in kinds:
        raise UnsupportedModel(
            f"{file}: {PREFIX}model is {kind!r}; read are {' and '.join(kinds)}; name the folder "
            "that it was converted from"
        )
    try:
        tokenizer = kinds[kind](vocabulary)
        tokenizer.add_tokens(list(_whole_tokens(vocabulary)))
        tokenizer.encode("")
    except BaseException as error:
        if not is_failure(error) or isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{file}: its tokenizer cannot be made: {reason(error)}") from error
    tokenizer.post_processor = _ends(vocabulary)
    return tokenizer


def tokenizer_fields(vocabulary: GgufVocabulary) -> dict[str, JsonValue]:
    """Return the fields of a tokenizer_config.json."""
    result: dict[str, JsonValue] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for name, short in names.items():
        number = vocabulary.id_of(name)
        if number is not None:
            result[f"{short}_token"] = vocabulary.tokens[number]
    return result


def templates(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates by their names; the usual one has none."""
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).removeprefix("."): text
        for name, text in metadata.fields.items()
        if name.startswith(key) and name != "tokenizer.chat_templates" and isinstance(text, str)
    }


def _byte_pairs(vocabulary: GgufVocabulary) -> Tokenizer:
    metadata, ids = vocabulary.metadata, vocabulary.ids
    name = metadata.text(f"{PREFIX}pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{metadata.file}: {PREFIX}pre is {name!r}; read are {', '.join(SPLITS)}; name the "
            "folder that it was converted from"
        )
    split = SPLITS[name]
    merges = [
        (first, second)
        for first, second in map(_halves, metadata.texts(f"{PREFIX}merges"))
        if first in ids and second in ids and first + second in ids
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=split.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _halves(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentence_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    number = vocabulary.id_of("unknown", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(vocabulary),
            unk_token=None if number is None else vocabulary.tokens[number],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_space = vocabulary.flag("add_space_prefix", True)
    first = [normalizers.Prepend(_SPACE)] if has_space else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if has_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the pairs that make a token, those of better tokens first."""
    ids, scores = vocabulary.ids, vocabulary.scores
    pairs = [
        (-scores[number], ids[token[:at]], ids[token[at:]])
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.types[number] == NORMAL
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    tokens = vocabulary.tokens
    return [(tokens[first], tokens[second]) for _, first, second in sorted(pairs)]


def _whole_tokens(vocabulary: GgufVocabulary) -> Iterator[AddedToken]:
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in _WHOLE:
            yield AddedToken(token, normalized=False, special=kind != USER_DEFINED)


def _ends(vocabulary: GgufVocabulary) -> processors.PostProcessor:
    """Return what puts the tokens for a text's begin and end around it."""
    first = _end(vocabulary, "bos", _adds_bos(vocabulary), 1)
    last = _end(vocabulary, "eos", False, 2)
    parts = [*first, "$A", *last]
    pair = [*parts, *(part.replace("$A", "$B:1") for part in parts)]
    tokens = [
        {"id": name, "ids": [number], "tokens": [vocabulary.tokens[number]]}
        for name, number in (first | last).items()
    ]
    return processors.TemplateProcessing(single=parts, pair=pair, special_tokens=tokens)


def _adds_bos(vocabulary: GgufVocabulary) -> bool:
    split = SPLITS.get(vocabulary.metadata.text(f"{PREFIX}pre", "default"))
    return vocabulary.kind == "llama" or bool(split and split.adds_bos)


def _end(vocabulary: GgufVocabulary, name: str, adds: bool, usual: int) -> dict[str, int]:
    """Return a name and the id of the token that is put at an end; none where there is none."""
    number = vocabulary.id_of(name, usual if vocabulary.kind == "llama" else None)
    is_there = vocabulary.flag(f"add_{name}_token", adds) and number is not None
    return {f"T{number}": number} if is_there and number is not None else {}
