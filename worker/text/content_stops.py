"""Stop strings of a chat's answer: they count in what is shown as its content.

So none ends an answer in its thinking or in a call's arguments. The text is read by the very
parsers with which the gateway tells these apart.
"""

from collections.abc import Sequence

from penstock.schemas.markup.forms import Markup
from penstock.schemas.markup.source import Source
from penstock.worker.text.stop_strings import Match, StopStrings


class ContentStops:
    """A filter like `StopStrings` that searches only the content of a text with marks.

    White space counts as far as it is shown: not after thinking, and around calls only once text
    follows it. No stop string reaches over a call.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool, markup: Markup) -> None:
        self._arguments = stops, include_in_output
        self._source = _Content(has_calls=markup.calls is not None)
        self._steps = markup.read(self._source)
        self._search = StopStrings(*self._arguments)
        self._tail = ""  # the end of the text, which is not released
        self._num_released = 0
        self._certain = self._end = 0  # places in the content read last: passed by the search, read

    def push(self, text: str, may_stop: bool = True) -> tuple[str, Match | None]:
        """Return the text that is now certain, and the match that ended it or None."""
        self._tail += text
        self._source.text += text
        return self._read(may_stop)

    def finish(self) -> tuple[str, Match | None]:
        """Return what was held back, when the text ends, and the match that only its end shows."""
        self._source.is_over = True
        text, match = self._read()
        return text if match else text + self._release(len(self._tail)), match

    def _read(self, may_stop: bool = True) -> tuple[str, Match | None]:
        next(self._steps, None)
        for start, text in self._source.shown():
            if start != self._end:
                self._search, self._certain = StopStrings(*self._arguments), start
            self._end = start + len(text)
            part, match = self._search.push(text, may_stop)
            self._certain += len(part)
            if match:
                return self._release(self._certain - self._num_released), match
        num_certain = self._source.num_certain
        place = self._certain if num_certain == self._end else num_certain
        return self._release(place - self._num_released), None

    def _release(self, count: int) -> str:
        text, self._tail = self._tail[:count], self._tail[count:]
        self._num_released += len(text)
        return text


class _Content(Source):
    """A text of which only the places of its content are kept.

    num_certain  characters of which it is certain that they are content, or none
    """

    def __init__(self, has_calls: bool) -> None:
        super().__init__({})
        self.num_certain = 0
        self._has_calls = has_calls
        self._parts: list[tuple[int, str]] = []
        self._blank = (0, "")  # where white space begins that is shown if no call follows, and it
        self._begins = False  # white space is not shown until text comes

    def shown(self) -> list[tuple[int, str]]:
        """Return the content found since it was last asked for: where each part begins, and it."""
        if self.is_over and not self.num_calls:
            self._show_blank()
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        start, visible = self.num_read - len(text), text.lstrip() if self._begins else text
        start += len(text) - len(visible)
        body = visible.rstrip() if self._has_calls else visible
        if body:
            self._show_blank()
            self._parts.append((start, body))
            self._begins = False
        before, blank = self._blank
        self._blank = (before if blank else start + len(body), blank + visible[len(body) :])
        self.num_certain = self._blank[0]

    def reasoning(self, text: str) -> None:
        self._begins = True
        self._show_blank()
        self.num_certain = self.num_read

    def call(self, name: str) -> None:
        self.num_calls += 1
        self._blank = (0, "")
        self.num_certain = self.num_read

    def arguments(self, text: str) -> None:
        self.num_certain = self.num_read

    def drop(self, text: str) -> None:
        if not self._blank[1]:
            self.num_certain = self.num_read

    def _show_blank(self) -> None:
        if self._blank[1]:
            self._parts.append(self._blank)
            self._blank = (0, "")
