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
from penstock.schemas.wire.checksum import EMPTY, roll


class SeenPiece(NamedTuple):
    """An event as its reader got it. The id says how far the reader is, as `Had` parses it."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class TokenErrors:
    """The tokens that are wrong.

    num_lost      made, or asked for, and not delivered
    num_repeated  delivered more than once
    num_foreign   delivered, but not the job's own: of another job, out of order, or with other text
    num_unproved  streams of which this is not known, since their log could not be read
    """

    num_lost: int = 0
    num_repeated: int = 0
    num_foreign: int = 0
    num_unproved: int = 0

    def __add__(self, addend: "TokenErrors") -> "TokenErrors":
        return TokenErrors(
            self.num_lost + addend.num_lost,
            self.num_repeated + addend.num_repeated,
            self.num_foreign + addend.num_foreign,
            self.num_unproved + addend.num_unproved,
        )

    def __str__(self) -> str:
        counts = f"{self.num_lost} lost, {self.num_repeated} repeated, {self.num_foreign} foreign"
        return counts + (f", {self.num_unproved} streams unproved" if self.num_unproved else "")

    def __bool__(self) -> bool:
        return bool(self.num_lost or self.num_repeated or self.num_foreign or self.num_unproved)


class _Cut(NamedTuple):
    """A place between two events of a log."""

    begins: int  # the event that ends here, in tokens
    num_chars: int  # characters of text until here
    checksum: int | None


def against_log(
    pieces: Sequence[SeenPiece], log: Iterable[Delta], num_expected: int = 0
) -> TokenErrors:
    """Compare the events that a reader got with the job's log, in tokens.

    An event without text may not have been shown by itself; the next one's id counts its tokens.
    `num_expected` is how many tokens were to be made at least.
    """
    cuts, texts, num_chars, checksum, end = {0: _Cut(0, 0, EMPTY)}, list[str](), 0, EMPTY, 0
    at = num_lost = num_repeated = num_foreign = 0
    for delta in log:
        num_lost += max(0, delta.position - end)
        checksum, end = roll(checksum, delta.index, delta.token_ids), delta.end
        texts.append(delta.text)
        num_chars += len(delta.text)
        cuts[end] = _Cut(delta.position, num_chars, checksum)
    text = "".join(texts)
    num_lost += max(0, num_expected - end)
    for event in pieces:
        position, seen_checksum = _parsed(event.id)
        cut = cuts.get(position)
        if cut is None or seen_checksum not in (cut.checksum, None):
            num_foreign += max(1, position - at)
            continue
        if position <= at:
            num_repeated += max(1, position - cut.begins)
            continue
        expected = text[cuts[at].num_chars : cut.num_chars]
        if event.text != expected:
            is_later_part = expected.endswith(event.text) and cut.begins > at
            num_lost += cut.begins - at if is_later_part else 0
            num_foreign += 0 if is_later_part else position - at
        at = position
    if text[cuts[at].num_chars :]:
        num_lost += end - at
    return TokenErrors(num_lost, num_repeated, num_foreign)


def _parsed(event_id: str) -> Had:
    try:
        return Had.parse(event_id, "id")
    except InvalidJob:
        return Had(-1)


def against_counts(
    num_pieces: int, num_counted: int | None, num_expected: int | None
) -> TokenErrors:
    """Compare what came with what the server counts and what was asked for.

    num_pieces    pieces of the stream with text, of which each has at least one token
    num_counted   completion tokens by the server's usage; None where it sent none
    num_expected  exactly so many were to be made; None where an answer may be shorter
    """
    if num_counted is None:
        return TokenErrors(
            num_repeated=0 if num_expected is None else max(0, num_pieces - num_expected)
        )
    short = 0 if num_expected is None else max(0, num_expected - num_counted)
    return TokenErrors(num_lost=short, num_repeated=max(0, num_pieces - num_counted))
