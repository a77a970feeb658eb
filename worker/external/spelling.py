"""Makes ids for a text that came without any: tokens whose bytes, one after another, are the text.

They need not be those that the model drew, but give the same text again.
"""

from functools import cached_property

from penstock.worker.text.model_tokenizer import ModelTokenizer


class Speller:
    """Spells texts in the tokens of one model."""

    def __init__(self, text: ModelTokenizer, vocab_size: int) -> None:
        self._text = text
        self._vocab_size = vocab_size

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return self._text.plain_tokens(self._vocab_size)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, at each place the longest. Raises ValueError."""
        raw, at, token_ids = text.encode(), 0, []
        while at < len(raw):
            for end in range(min(len(raw), at + self._longest), at, -1):
                if (token_id := self._ids.get(raw[at:end])) is not None:
                    token_ids.append(token_id)
                    at = end
                    break
            else:
                raise ValueError(f"byte {raw[at]} is no token of this model")
        return token_ids

    def text(self, token_ids: list[int]) -> str:
        """Return the text of a prompt and what follows it, as a server is to read it.

        The special tokens that begin every text are left to the server.
        """
        start = self._text.encode("")
        if start and token_ids[: len(start)] == start:
            token_ids = token_ids[len(start) :]
        return self._text.decode(token_ids, skip_special_tokens=False)
