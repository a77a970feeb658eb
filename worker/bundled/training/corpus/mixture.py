"""The corpus: an endless, seeded stream of documents in fixed shares."""

from collections.abc import Callable, Iterator
from random import Random

from penstock.worker.bundled.training.corpus.arithmetic import arithmetic, sums
from penstock.worker.bundled.training.corpus.chats import (
    Draw,
    chat,
    echo,
    explanation,
    fact,
    favourite,
    greeting,
    how_to,
    listing,
    pleasantry,
    recall,
    refusal,
    sentiment,
    sequence,
)
from penstock.worker.bundled.training.corpus.document import Document
from penstock.worker.bundled.training.corpus.extraction import extraction
from penstock.worker.bundled.training.corpus.prose import prose
from penstock.worker.bundled.training.corpus.stories import story, story_on_request
from penstock.worker.bundled.training.corpus.tools import tool_chat

_SMALL_TALK: tuple[Draw, ...] = (
    greeting, pleasantry, explanation, fact, how_to, listing, sequence, sentiment, favourite,
    recall,
)  # fmt: skip
_EXCHANGES: tuple[Draw, ...] = (
    *_SMALL_TALK, refusal, explanation, explanation, explanation, echo, echo, recall,
    story_on_request,
)  # fmt: skip


def documents(seed: int) -> Iterator[Document]:
    """Yield documents without end, the same ones for the same seed."""
    rng = Random(seed)
    kinds, shares = zip(*_SHARES, strict=True)
    while True:
        yield rng.choices(kinds, shares)[0](rng)


def _small_talk(rng: Random) -> Document:
    return chat(rng, _EXCHANGES)


def _extractions(rng: Random) -> Document:
    return chat(rng, (extraction,))


def _sums(rng: Random) -> Document:
    return chat(rng, (arithmetic,))


def _echoes(rng: Random) -> Document:
    return chat(rng, (echo, echo, recall))


def _stories(rng: Random) -> Document:
    return chat(rng, (story_on_request,))


def _anything(rng: Random) -> Document:
    """Return a conversation that jumps from one kind of thing to the next."""
    return chat(rng, (*_EXCHANGES, extraction, extraction, arithmetic, arithmetic))


def _tools(rng: Random) -> Document:
    return tool_chat(rng, rng.choice(_SMALL_TALK))


# Shares of documents, not of tokens: a tool chat is three times as long as a greeting.
_SHARES: tuple[tuple[Callable[[Random], Document], float], ...] = (
    (_small_talk, 25),
    (_extractions, 28),
    (_tools, 12),
    (_sums, 18),
    (_echoes, 8),
    (_stories, 3),
    (_anything, 6),
    (story, 3),
    (prose, 8),
    (sums, 5),
)
