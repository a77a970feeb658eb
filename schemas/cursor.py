"""How far a reader is: what it has of a log, and whether the next event continues that."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec

from penstock.schemas.checksum import NOTHING, roll
from penstock.schemas.errors import InvalidJob, StreamDiverged
from penstock.schemas.event import Delta, Done, Event, Failed
from penstock.schemas.result import after

_ID = re.compile(r"([0-9]{1,15})(?:-([0-9a-f]{8}))?")


class Had(NamedTuple):
    """Tokens that a reader has, and their checksum; none: it does not say."""

    position: int
    checksum: int | None = None

    @classmethod
    def parse(cls, text: str, param: str) -> Self:
        """Read an id of an event, or the number of tokens alone. Raises InvalidJob."""
        if (found := _ID.fullmatch(text)) is None:
            sentence = "must be a number of tokens, or the id of one of this job's events"
            raise InvalidJob(f"{param}: {sentence}", param)
        return cls(int(found[1]), None if found[2] is None else int(found[2], 16))

    @property
    def id(self) -> str:
        return (
            f"{self.position}" if self.checksum is None else f"{self.position}-{self.checksum:08x}"
        )


class _Given(NamedTuple):
    position: int
    checksum: int
    num_chars: int


class Missed(StreamDiverged):
    """An event begins behind what was delivered: in a log that is a hole, in messages a loss."""


class Straddled(StreamDiverged):
    """An event began before what was delivered and goes on after it: the log was made anew.

    `Cursor.begin_again`, and then the log from there on, tell which of its text was delivered.
    """


@dataclass(slots=True)
class Cursor:
    """Tokens delivered and their checksum; none where the reader did not say it.

    What the reader has, it has for good: a log that was lost in part and made anew, or an event
    that is another's, does not continue it. A log made anew may be cut otherwise. Which text goes
    with a part of an event only its whole log tells, so it is read again from where the cursor
    began, and what was delivered is counted off in tokens and characters.
    """

    job_id: str
    position: int = 0
    checksum: int | None = None
    _begun: Had = field(init=False)
    # Of text, since it began; none: it began inside an event, and who knows with which of its text.
    _num_chars: int | None = field(init=False, default=0)
    _given: _Given | None = field(init=False, default=None)  # while the log is read again

    def __post_init__(self) -> None:
        if self.position == 0 and self.checksum is None:
            self.checksum = NOTHING
        self._begun = Had(self.position, self.checksum)

    @property
    def looks_from(self) -> int:
        """Where to begin in a log: with the last token had, whose event tells its checksum."""
        return max(0, self.position - 1)

    def take(self, event: Event) -> Event | None:
        """What the reader lacks of the event, which becomes had; none: it has all of it.

        Raises StreamDiverged, Missed, Straddled.
        """
        if event.position > self.position:
            raise Missed(self.job_id, self.position)
        if not isinstance(event, Delta):
            return self._take_end(event)
        if event.end <= self.position:
            self._pass(event)
            return None
        rest = after(event, self.position)
        assert isinstance(rest, Delta)
        checksum = rest.checksum
        if self.checksum is not None:
            checksum = roll(self.checksum, rest.index, rest.token_ids)
            self._compare(rest, checksum)
        if rest is not event:
            self._enter()
        self.position, self.checksum = rest.end, checksum
        if self._num_chars is not None:
            self._num_chars += len(rest.text)
        return rest if self._given is None else self._lacking(rest, self._given)

    def begin_again(self) -> None:
        """After Straddled: the log is to be read from `position` on, which is where it began."""
        assert self.checksum is not None and self._num_chars is not None
        self._given = _Given(self.position, self.checksum, self._num_chars)
        self.position, self.checksum = self._begun
        self._num_chars = 0

    def _take_end(self, end: Done | Failed) -> Done | Failed:
        if end.position < self.position or self._given is not None:
            raise StreamDiverged(self.job_id, self.position)
        self._compare(end, self.checksum)
        return end

    def _pass(self, had: Delta) -> None:
        if had.end == self.position:
            self._compare(had, self.checksum)
            self.checksum = had.checksum if self.checksum is None else self.checksum

    def _compare(self, event: Event, known: int | None) -> None:
        if known is not None and event.checksum not in (known, None):
            raise StreamDiverged(self.job_id, self.position)

    def _enter(self) -> None:
        """Begin inside an event; only who never had one of its texts may."""
        if self.checksum is None and self._begun.position == self.position and not self._given:
            self._num_chars = None
            return
        is_known = self.checksum is not None and self._num_chars is not None
        can_count = is_known and self._begun.position < self.position and not self._given
        raise (Straddled if can_count else StreamDiverged)(self.job_id, self.position)

    def _lacking(self, rest: Delta, given: _Given) -> Delta | None:
        """What goes beyond what was delivered before the log was read again."""
        if rest.end < given.position:
            return None
        lacking = rest.token_ids[given.position - rest.position :]
        num_chars = (self._num_chars or 0) - given.num_chars
        is_same = roll(given.checksum, rest.index, lacking) == self.checksum
        if not is_same or not 0 <= num_chars <= (len(rest.text) if lacking else 0):
            raise StreamDiverged(self.job_id, given.position)
        self._given = None
        if not lacking:
            return None
        return msgspec.structs.replace(
            rest,
            position=given.position,
            token_ids=lacking,
            text=rest.text[len(rest.text) - num_chars :],
            logprobs=rest.logprobs and rest.logprobs[-len(lacking) :],
        )
