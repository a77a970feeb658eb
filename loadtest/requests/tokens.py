"""The proof that a reader got every token once, and no other.

Penstock's events carry how many tokens their reader has and a checksum of them
(`schemas.cursor`). After a run each stream is held against its job's log: token ids, cuts and text.
Another server has no log, so of it nothing is known but what it counts itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schemas.cursor import Had
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Delta
from penstock.schemas.wire.checksum import NOTHING, roll


class SeenPiece(NamedTuple):
    """An event as its reader got it. The id says how far the reader is, as `Had` parses it."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class TokenErrors:
    """The tokens that are wrong.

    lost      made, or asked for, and not delivered
    repeated  delivered more than once
    foreign   delivered, but not the job's own: of another job, out of order, or with other text
    unproved  streams of which this is not known, since their log could not be read
    """

    lost: int = 0
    repeated: int = 0
    foreign: int = 0
    unproved: int = 0

    def __add__(self, other: "TokenErrors") -> "TokenErrors":
        return TokenErrors(
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.foreign + other.foreign,
            self.unproved + other.unproved,
        )

    def __str__(self) -> str:
        told = f"{self.lost} lost, {self.repeated} repeated, {self.foreign} foreign"
        return told + (f", {self.unproved} streams unproved" if self.unproved else "")

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.foreign or self.unproved)


class _Cut(NamedTuple):
    """A place between two events of a log."""

    begins: int  # the event that ends here, in tokens
    num_chars: int  # characters of text until here
    checksum: int | None


def against_log(seen: Sequence[SeenPiece], log: Iterable[Delta], asked: int = 0) -> TokenErrors:
    """Compare the events that a reader got with the job's log, in tokens.

    An event without text may not have been shown by itself; the next one's id counts its tokens.
    `asked` is how many tokens were to be made at least.
    """
    cuts, texts, num_chars, checksum, end = {0: _Cut(0, 0, NOTHING)}, list[str](), 0, NOTHING, 0
    at = lost = repeated = foreign = 0
    for delta in log:
        lost += max(0, delta.position - end)
        checksum, end = roll(checksum, delta.index, delta.token_ids), delta.end
        texts.append(delta.text)
        num_chars += len(delta.text)
        cuts[end] = _Cut(delta.position, num_chars, checksum)
    text = "".join(texts)
    lost += max(0, asked - end)
    for event in seen:
        position, known = _parsed(event.id)
        cut = cuts.get(position)
        if cut is None or known not in (cut.checksum, None):
            foreign += max(1, position - at)
            continue
        if position <= at:
            repeated += max(1, position - cut.begins)
            continue
        expected = text[cuts[at].num_chars : cut.num_chars]
        if event.text != expected:
            is_later_part = expected.endswith(event.text) and cut.begins > at
            lost += cut.begins - at if is_later_part else 0
            foreign += 0 if is_later_part else position - at
        at = position
    if text[cuts[at].num_chars :]:
        lost += end - at
    return TokenErrors(lost, repeated, foreign)


def _parsed(event_id: str) -> Had:
    try:
        return Had.parse(event_id, "id")
    except InvalidJob:
        return Had(-1)


def against_counts(num_pieces: int, num_counted: int | None, asked: int | None) -> TokenErrors:
    """Compare what came with what the server counts and what was asked for.

    num_pieces   pieces of the stream with text, of which each has at least one token
    num_counted  completion tokens by the server's usage; None where it sent none
    asked        exactly so many were to be made; None where an answer may be shorter
    """
    if num_counted is None:
        return TokenErrors(repeated=0 if asked is None else max(0, num_pieces - asked))
    short = 0 if asked is None else max(0, asked - num_counted)
    return TokenErrors(lost=short, repeated=max(0, num_pieces - num_counted))
