"""Streams that a reader can come back to: the ids of their chunks, and what follows one of them."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Self

from penstock.schemas.cursor import Had
from penstock.schemas.errors import StreamDiverged
from penstock.schemas.event import Delta, Done, Failed

_ID = re.compile(r"([^.]*)(?:[.]([0-9]{1,6}))?")


class ReaderPosition(NamedTuple):
    """The place up to which a caller has a stream.

    The caller has the tokens that `progress` counts, and `num_chunks` chunks of the event after
    them. The checksum in `progress` is that of the last event that the caller has, wholly or in
    part.
    """

    id: str
    progress: Had
    num_chunks: int = 0

    @classmethod
    def parse(cls, text: str, param: str) -> Self:
        """Read a chunk's id. Raises InvalidJob."""
        match = _ID.fullmatch(text)
        head, number = match.groups() if match else (text, None)
        return cls(text, Had.parse(head, param), int(number or 0))

    def fits(self, event: Delta | Done) -> bool:
        """Return whether the event is one of those that the caller had, or comes after them."""
        tokens, checksum = self.progress
        if isinstance(event, Done):
            return tokens + bool(self.num_chunks) <= event.position
        is_whole = not event.position < tokens < event.end
        is_its = tokens == (event.position if self.num_chunks else event.end)
        return is_whole and (
            not is_its or None in (checksum, event.checksum) or checksum == event.checksum
        )


START = ReaderPosition("", Had(0))


class ResumableStream:
    """Renders the chunks of one job's stream. A subclass says what they look like.

    The last chunk of an event has the event's id. The id of a chunk before it is the number of
    tokens delivered before the event, a dash, the event's checksum, a dot, and the chunk's number
    in the event. A caller who comes back with an id gets what follows it. What goes before is
    rendered again, to find the place in calls and choices, but is not shown. Where that is not what
    the caller had, StreamDiverged is raised.
    """

    def __init__(self, job_id: str, position: ReaderPosition = START) -> None:
        self.last_id = position.id
        self._job_id = job_id
        self._position = position

    def render(self, event: Delta | Done | Failed) -> bytes:
        """Return the event's chunks, without those that the caller has.

        Raises StreamDiverged where the event does not fit what the caller has.
        """
        if isinstance(event, Failed):
            return self.render_error(event)
        if not self._position.fits(event):
            raise StreamDiverged(self._job_id, self._position.progress.position)
        if not isinstance(event, Delta):
            return self.ending(event)
        chunks = self.chunks(event)
        if event.end <= self._position.progress.position:
            return b""
        if len(chunks) == 1:
            return b"id: %b\n%b" % (event.id.encode(), chunks[0])
        return b"".join(self._numbered(event, chunks))

    def chunks(self, event: Delta) -> list[bytes]:
        """Return what is shown of new tokens, each as an event of SSE without an id."""
        raise NotImplementedError

    def ending(self, event: Done) -> bytes:
        """Return what is shown at the end, as events of SSE."""
        raise NotImplementedError

    def render_error(self, error: Failed) -> bytes:
        raise NotImplementedError

    def _numbered(self, event: Delta, chunks: list[bytes]) -> Iterator[bytes]:
        _, progress, num_seen = self._position
        had_of_it = num_seen if event.position == progress.position else 0
        before = Had(event.position, event.checksum)
        for number, chunk in enumerate(chunks, 1):
            if number == len(chunks):
                yield b"id: %b\n%b" % (event.id.encode(), chunk)
            elif number > had_of_it:
                yield b"id: %b.%d\n%b" % (before.id.encode(), number, chunk)
