"""How far a reader is: what it has of a log, and whether the next event continues that."""

from dataclasses import dataclass

from schemas.checksum import NOTHING, roll
from schemas.errors import StreamDiverged
from schemas.event import Delta, Event
from schemas.result import after


@dataclass(slots=True)
class Cursor:
    """Tokens delivered and their checksum; none where the reader began behind the first token.

    What the reader has, it has for good: a log that was lost in part and made anew, or an event
    that is another's, does not continue it.
    """

    job_id: str
    position: int
    checksum: int | None = None

    def __post_init__(self) -> None:
        if self.position == 0:
            self.checksum = NOTHING

    def take(self, event: Event) -> Event | None:
        """What the reader lacks of the event, which becomes had; none: it has all of it.

        Raises StreamDiverged.
        """
        rest = after(event, self.position)
        if rest is None:
            return None
        known = self.checksum
        if known is not None and isinstance(rest, Delta):
            known = roll(known, rest.index, rest.token_ids)
        is_short = known is not None and rest.position < self.position  # an end before what it ends
        is_another = known is not None and rest.checksum not in (known, None)
        if rest.position > self.position or is_short or is_another:
            raise StreamDiverged(self.job_id, self.position)
        if isinstance(rest, Delta):
            self.position, self.checksum = rest.end, rest.checksum if known is None else known
        return rest
