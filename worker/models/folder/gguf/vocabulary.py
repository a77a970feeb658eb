"""The tokens of a GGUF file, and which of them end a text."""

from penstock.worker.models.folder.gguf.metadata import Metadata

PREFIX = "tokenizer.ggml."
NORMAL, NO_TOKEN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Texts of tokens that end a turn, which llama.cpp takes for no text, whatever their type is.
_TURN_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<EOT>",
}  # fmt: skip
_ENDS = _TURN_ENDS | {"</s>", "<eos>"}


class GgufVocabulary:
    """The tokens of a file, each with a type and a score."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.kind = metadata.text(f"{PREFIX}model")
        tokens = metadata.texts(f"{PREFIX}tokens")
        self.tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) < len(tokens):
            token = next(
                token for number, token in enumerate(self.tokens) if self.ids[token] != number
            )
            raise metadata.broken(f"{PREFIX}tokens", token, "there once")
        self.types = [
            CONTROL if token in _TURN_ENDS else kind
            for token, kind in zip(self.tokens, self._numbers("token_type", NORMAL), strict=True)
        ]
        self.scores = self._numbers("scores", 0)

    def id_of(self, name: str, usual: int | None = None) -> int | None:
        """Return the id that a field names, such as `bos`; None where there is no such token."""
        number = self.metadata.fields.get(f"{PREFIX}{name}_token_id", usual)
        return number if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def enders(self) -> list[int]:
        """Return the ids that end a turn or a text, whether or not a field names them."""
        by_field = {self.id_of(name) for name in ("eos", "eot", "eom")} - {None}
        by_text = {
            number
            for number, token in enumerate(self.tokens)
            if self.types[number] == CONTROL and token in _ENDS
        }
        return sorted({number for number in by_field if number is not None} | by_text)

    def flag(self, name: str, usual: bool) -> bool:
        return bool(self.metadata.fields.get(f"{PREFIX}{name}", usual))

    def _numbers(self, name: str, usual: float) -> list[float]:
        values = self.metadata.fields.get(f"{PREFIX}{name}")
        if values is None:
            return [usual] * len(self.tokens)
        if not isinstance(values, list) or len(values) != len(self.tokens):
            raise self.metadata.broken(f"{PREFIX}{name}", "something else", "a number a token")
        return [value if isinstance(value, int | float) else usual for value in values]
