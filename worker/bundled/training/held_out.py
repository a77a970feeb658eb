"""Text that the bundled model has not seen, and which of its tokens are the model's to write."""

from itertools import islice

from tokenizers import Tokenizer

from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.bundled.sample import Sample
from penstock.worker.bundled.training.corpus.mixture import documents
from penstock.worker.bundled.training.rendering import ANSWER_SHARE, render

SEED = 8096


def held_out(num_documents: int) -> list[Sample]:
    """Return this many documents, the same ones every time."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    samples = []
    for document in islice(documents(SEED), num_documents):
        token_ids: list[int] = []
        is_answer: list[bool] = []
        for piece in render(document):
            ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
            token_ids += ids
            is_answer += [piece.share == ANSWER_SHARE] * len(ids)
        samples.append(Sample(token_ids, is_answer))
    return samples
