"""Reads a chat's completion as its request wants it: reasoning, tool calls and content."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.schemas.api.openai import JsonObject
from penstock.schemas.markup.forms import FORCED_FORM, Markup
from penstock.schemas.markup.source import CallPiece, Found, MarkupReader, joined, whole


class PlainText:
    """Reads text that is nothing but content."""

    def feed(self, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class WholeCalls:
    """Holds the calls of some tools until they are whole."""

    def __init__(self, reader: MarkupReader, names: frozenset[str]) -> None:
        self._reader = reader
        self._names = names
        self._pieces: list[CallPiece] = []

    def feed(self, text: str) -> Found:
        return self._with_whole(self._reader.feed(text))

    def finish(self) -> Found:
        findings = self._with_whole(self._reader.finish())
        findings.calls += joined(self._pieces)
        self._pieces = []
        return findings

    def _with_whole(self, findings: Found) -> Found:
        calls: list[CallPiece] = []
        for piece in findings.calls:
            if piece.name is not None:
                calls += joined(self._pieces)
                self._pieces = []
            is_held = self._pieces or piece.name in self._names
            (self._pieces if is_held else calls).append(piece)
        findings.calls = calls
        return findings


TextReader = PlainText | MarkupReader | WholeCalls


@dataclass(frozen=True, slots=True)
class Reading:
    """How a request wants its answer read.

    schemas    what the arguments of each tool may be, by its name; none: no calls
    whole      the names of tools whose calls are given in one piece
    is_forced  a grammar holds the answer of an older worker to be one call
    """

    schemas: Mapping[str, JsonObject] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    is_forced: bool = False

    def read(self, text: str, markup: Markup | None) -> Found:
        """Return what is in the whole text of a completion."""
        reader = self.reader(markup)
        return whole((reader.feed(text), reader.finish()))

    def reader(self, markup: Markup | None) -> TextReader:
        """Return a reader of one completion. Its markup is None from an older worker."""
        form = markup or Markup(FORCED_FORM if self.is_forced else "hermes")
        if not self.schemas:
            form = Markup(None, form.reasoning, form.is_open)
        if form.calls is form.reasoning is None:
            return PlainText()
        reader = MarkupReader(form.read, self.schemas)
        return WholeCalls(reader, self.whole) if self.whole else reader
