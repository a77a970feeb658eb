"""The cursor of a reader in a log, and the check that the next event continues it."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec

from penstock.schemas.errors import InvalidJob, StreamDiverged
from penstock.schemas.event import Delta, Done, Event, Failed
from penstock.schemas.result import after
from penstock.schemas.wire.checksum import EMPTY, roll

_ID = re.compile(r"([0-9]{1,15})(?:-([0-9a-f]{8}))?")


class Had(NamedTuple):
    """The number of tokens that a reader has, and their checksum, None if it does not say."""

    position: int
    checksum: int | None = None

    @classmethod
    def parse(cls, text: str, param: str) -> Self:
        """Read an id of an event, or the number of tokens alone. Raises InvalidJob."""
        if (match := _ID.fullmatch(text)) is None:
            sentence = "must be a number of tokens, or the id of one of this job's events"
            raise InvalidJob(f"{param}: {sentence}", param)
        return cls(int(match[1]), None if match[2] is None else int(match[2], 16))

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
    """Raised when an event begins beyond the end of what was delivered.

    In a log this is a hole. Among published messages it means that one was lost.
    """


class Straddled(StreamDiverged):
    """Raised when an event begins before the end of what was delivered and goes on after it.

    The log was made anew, with other cuts. `Cursor.begin_again`, and then the log from there on,
    tell which of its text was delivered.
    """


@dataclass(slots=True)
class Cursor:
    """The number of tokens delivered to a reader, and their checksum, None if it did not say it.

    What the reader has cannot be taken back. It is not continued by a log that was lost in part and
    made anew with other tokens, nor by an event of another log. A log made anew may be cut
    otherwise. Only the whole log tells which text goes with a part of an event, so it is read again
    from where the cursor began, and what was delivered is counted off in tokens and characters.
    """

    job_id: str
    position: int = 0
    checksum: int | None = None
    _start: Had = field(init=False)
    # Characters of text since it began; None where it began inside an event, since it is not known
    # which part of that event's text the reader has.
    _num_chars: int | None = field(init=False, default=0)
    _delivery: _Given | None = field(init=False, default=None)  # while the log is read again

    def __post_init__(self) -> None:
        if self.position == 0 and self.checksum is None:
            self.checksum = EMPTY
        self._start = Had(self.position, self.checksum)

    @property
    def looks_from(self) -> int:
        """Return where to begin in a log: at the last token had, whose event tells its checksum."""
        return max(0, self.position - 1)

    def take(self, event: Event) -> Event | None:
        """Return the part of the event that the reader lacks, and count it as delivered.

        Return None where the reader has all of it. Raises StreamDiverged, Missed, Straddled.
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
        return rest if self._delivery is None else self._lacking(rest, self._delivery)

    def begin_again(self) -> None:
        """Go back to where the cursor began. After Straddled, read the log from `position` on."""
        assert self.checksum is not None and self._num_chars is not None
        self._delivery = _Given(self.position, self.checksum, self._num_chars)
        self.position, self.checksum = self._start
        self._num_chars = 0

    def _take_end(self, end: Done | Failed) -> Done | Failed:
        if end.position < self.position or self._delivery is not None:
            raise StreamDiverged(self.job_id, self.position)
        self._compare(end, self.checksum)
        return end

    def _pass(self, delta: Delta) -> None:
        if delta.end == self.position:
            self._compare(delta, self.checksum)
            self.checksum = delta.checksum if self.checksum is None else self.checksum

    def _compare(self, event: Event, checksum: int | None) -> None:
        if checksum is not None and event.checksum not in (checksum, None):
            raise StreamDiverged(self.job_id, self.position)

    def _enter(self) -> None:
        """Begin inside an event, which only a new reader without a checksum may.

        For another it raises Straddled, or StreamDiverged where the log cannot be read again.
        """
        if self.checksum is None and self._start.position == self.position and not self._delivery:
            self._num_chars = None
            return
        is_known = self.checksum is not None and self._num_chars is not None
        can_count = is_known and self._start.position < self.position and not self._delivery
        raise (Straddled if can_count else StreamDiverged)(self.job_id, self.position)

    def _lacking(self, rest: Delta, delivery: _Given) -> Delta | None:
        """Return what goes beyond the tokens delivered before the log was read again, or None."""
        if rest.end < delivery.position:
            return None
        token_ids = rest.token_ids[delivery.position - rest.position :]
        num_chars = (self._num_chars or 0) - delivery.num_chars
        is_same = roll(delivery.checksum, rest.index, token_ids) == self.checksum
        if not is_same or not 0 <= num_chars <= (len(rest.text) if token_ids else 0):
            raise StreamDiverged(self.job_id, delivery.position)
        self._delivery = None
        if not token_ids:
            return None
        return msgspec.structs.replace(
            rest,
            position=delivery.position,
            token_ids=token_ids,
            text=rest.text[len(rest.text) - num_chars :],
            logprobs=rest.logprobs and rest.logprobs[-len(token_ids) :],
            prompt_logprobs=None if len(token_ids) < len(rest.token_ids) else rest.prompt_logprobs,
        )
