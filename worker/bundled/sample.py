"""A document as token ids, for measuring how well a model predicts it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of a document, and for each whether the model is to write it."""

    token_ids: list[int]
    is_answer: list[bool]
