"""A document as token ids, for measuring how well a model predicts it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A document's tokens; of each, whether it is the model's to write."""

    token_ids: list[int]
    is_answer: list[bool]
