"""Chooses how the text of a chat's completion is read: what it thinks, calls and answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.markup import calls
from penstock.gateway.markup.channels import channels
from penstock.gateway.markup.source import (
    CallPiece,
    Found,
    MarkupReader,
    Parser,
    Source,
    Steps,
    joined,
)
from penstock.schemas.markup import MARKS, THINKING, Markup
from penstock.schemas.openai import JsonObject

_PARSERS: Mapping[str | None, Parser] = {
    "hermes": calls.hermes,
    "llama3_json": calls.llama3_json,
    "mistral": calls.mistral,
    "qwen3_xml": calls.qwen3_xml,
    "deepseek_v3": calls.deepseek_v3,
    "pythonic": calls.pythonic,
    "json": calls.forced,
    None: calls.content,
}


class TextReader(Protocol):
    """Reads the text of one completion, piece by piece."""

    def feed(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


class PlainText:
    """Reads text that is nothing but content."""

    def feed(self, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class WholeCalls:
    """Holds the calls of some tools until they are whole."""

    def __init__(self, reader: TextReader, names: frozenset[str]) -> None:
        self._reader = reader
        self._names = names
        self._held: list[CallPiece] = []

    def feed(self, text: str) -> Found:
        return self._with_whole(self._reader.feed(text))

    def finish(self) -> Found:
        found = self._with_whole(self._reader.finish())
        found.calls += joined(self._held)
        self._held = []
        return found

    def _with_whole(self, found: Found) -> Found:
        calls: list[CallPiece] = []
        for piece in found.calls:
            if piece.name is not None:
                calls += joined(self._held)
                self._held = []
            is_held = self._held or piece.name in self._names
            (self._held if is_held else calls).append(piece)
        found.calls = calls
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """How a request wants its answer read.

    schemas    those of the arguments of the tools that may be called, by name; none: no calls
    whole      the names of tools whose calls are given in one piece
    is_forced  a grammar holds the answer of an older worker to be one call
    """

    schemas: Mapping[str, JsonObject] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    is_forced: bool = False

    def reader(self, markup: Markup | None) -> TextReader:
        """Return a reader of one completion. Its markup is None from an older worker."""
        parser = self._parser(markup or Markup("json" if self.is_forced else "hermes"))
        if parser is calls.content:
            return PlainText()
        reader = MarkupReader(parser, self.schemas)
        return WholeCalls(reader, self.whole) if self.whole else reader

    def _parser(self, markup: Markup) -> Parser:
        parser: Parser = calls.content
        if "openai" in (markup.calls, markup.reasoning) or markup.reasoning == "openai_gptoss":
            return channels
        if self.schemas:
            parser = _PARSERS[markup.calls]
        if markup.reasoning in THINKING:
            return _after_thinking(markup, parser)
        return parser


def _after_thinking(markup: Markup, parser: Parser) -> Parser:
    """Return a parser that reads thinking first. A call ends it too, where calls are read."""
    begin, end = THINKING[markup.reasoning or ""]
    call = MARKS[markup.calls or ""][:1] if parser is _PARSERS.get(markup.calls) else ()

    def read(source: Source) -> Steps[None]:
        if (yield from source.skip(begin)) or markup.is_open:
            mark = yield from source.upto((end, *call), source.reasoning)
            if mark != end:
                source.held = mark + source.held
        yield from parser(source)

    return read
