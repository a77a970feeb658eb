"""Text that the bundled model has not seen, and who is to have written it."""

from dataclasses import dataclass
from itertools import islice

from tokenizers import Tokenizer

from worker.bundled.corpus.mixture import documents
from worker.bundled.paths import BUNDLED_MODEL
from worker.bundled.rendering import ANSWER_SHARE, render

SEED = 8096


@dataclass(frozen=True, slots=True)
class Sample:
    """A document's tokens; of each, whether it is the model's to write."""

    token_ids: list[int]
    is_answer: list[bool]


def held_out(num_documents: int) -> list[Sample]:
    """The same ones every time."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    samples = []
    for document in islice(documents(SEED), num_documents):
        token_ids: list[int] = []
        is_answer: list[bool] = []
        for piece in render(document):
            ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
            token_ids += ids
            is_answer += [piece.learned == ANSWER_SHARE] * len(ids)
        samples.append(Sample(token_ids, is_answer))
    return samples
