"""A search for stop strings in a text that arrives in pieces, which lets no part of them out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """The stop string that was found; what follows it was dropped."""

    stop: str


class StopStrings:
    """A filter that ends a text at the stop string that is complete first.

    Of two that end at the same letter, the longer one counts. That choice does not depend on how
    the text was cut into pieces. Text that may yet turn out to begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._searches = [_Search(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._by_first = dict[str, set[int]]()  # the searches that a letter begins
        for place, search in enumerate(self._searches):
            self._by_first.setdefault(search.stop[0], set()).add(place)
        self._candidates = set[int]()  # searches of whose stop the text may have the beginning
        self._include_in_output = include_in_output
        self._tail = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, Match | None]:
        """Return the text that is now certain, and the match that ended it or None.

        Without `may_stop` nothing ends it.
        """
        start = len(self._tail)
        self._tail += text
        for end, letter in enumerate(text, start + 1):
            if stop := self._advance(letter, may_stop):
                cut = end if self._include_in_output else end - len(stop)
                return self._tail[:cut], Match(stop)
        num_held = max((self._searches[place].num_matched for place in self._candidates), default=0)
        return self._release(num_held), None

    def _advance(self, letter: str, may_stop: bool) -> str | None:
        """Read a letter; return the longest stop string that it completes."""
        looked_at = self._candidates | self._by_first.get(letter, set())
        complete = [place for place in looked_at if self._searches[place].advance(letter)]
        self._candidates = {place for place in looked_at if self._searches[place].num_matched}
        return self._searches[min(complete)].stop if complete and may_stop else None

    def finish(self) -> tuple[str, Match | None]:
        """Return what was held back, when the text ends without completing a stop string."""
        return self._release(0), None

    def _release(self, num_held: int) -> str:
        cut = len(self._tail) - num_held
        text, self._tail = self._tail[:cut], self._tail[cut:]
        return text


class _Search:
    """The search for one stop string, by the algorithm of Knuth, Morris and Pratt.

    The text read so far ends with the first `num_matched` letters of the stop string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0] * len(stop)  # [i]: the longest border of the first i + 1 letters
        border = 0
        for place in range(1, len(stop)):
            while border and stop[place] != stop[border]:
                border = self._fallback[border - 1]
            border += stop[place] == stop[border]
            self._fallback[place] = border

    def advance(self, letter: str) -> bool:
        """Return whether this letter completes the stop string.

        Afterwards `num_matched` counts a proper prefix, never the whole stop string.
        """
        count = self.num_matched
        while count and self.stop[count] != letter:
            count = self._fallback[count - 1]
        count += self.stop[count] == letter
        is_complete = count == len(self.stop)
        self.num_matched = self._fallback[count - 1] if is_complete else count
        return is_complete
