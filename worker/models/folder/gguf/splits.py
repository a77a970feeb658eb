"""How a text is split before pairs of bytes are merged, by `tokenizer.ggml.pre`.

The expressions are those of the models' own tokenizer.json, as llama.cpp notes them beside its own.
"""

from dataclasses import dataclass

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
)
_QWEN35 = _QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Split:
    """How a text is split.

    patterns       each splits what those before it left
    ignores_merges a word that is a token is one, whatever merges would make of it
    adds_bos       a text begins with the token for it, where the file does not say
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


SPLITS = {
    "default": Split(_DEFAULT),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Split((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Split((_LLAMA3,), ignores_merges=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"),
        Split((_QWEN2,)),
    ),
    "qwen35": Split((_QWEN35,)),
    "tekken": Split((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((_GPT4O,))),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"),
        Split((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        Split((r"\p{N}", _GPT2)),
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": Split(_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(_DEEPSEEK3)),
}
