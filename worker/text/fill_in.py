"""Prompts whose answer stands between two parts, as models of code were taught them."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.schemas.errors import InvalidJob


class FillIn(NamedTuple):
    """One way to write the two parts, by tokens of the model's own.

    prefix, suffix  go before the parts
    middle          goes before the answer; "" where the parts come the other way round
    """

    prefix: str
    suffix: str
    middle: str

    def write(self, before: str, after: str) -> str:
        if not self.middle:
            return f"{self.suffix}{after}{self.prefix}{before}"
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"


FORMS = (
    FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen's coders, CodeGemma
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillIn("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's coders
    FillIn("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, CodeGeeX
    FillIn("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


def fill_in(before: str, after: str, token_id: Callable[[str], int | None]) -> str:
    """Return the prompt for what stands between two texts.

    token_id  returns a token's id, None where the tokenizer has no such token

    Raises InvalidJob where the tokenizer has the tokens of no form.
    """
    for form in FORMS:
        if all(token_id(token) is not None for token in form if token):
            return form.write(before, after)
    sentence = "this model's tokenizer has no tokens for a text to be filled in; leave it out"
    raise InvalidJob(f"suffix: {sentence}", "suffix")
