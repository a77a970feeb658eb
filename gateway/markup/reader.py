"""Chooses how the text of a chat's completion is read: what it thinks, calls and answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.markup import calls
from penstock.gateway.markup.channels import channels
from penstock.gateway.markup.source import Found, MarkupReader, Parser, Source, Steps
from penstock.schemas.markup import MARKS, THINKING, Markup
from penstock.schemas.openai import JsonObject

_PARSERS: Mapping[str | None, Parser] = {
    "hermes": calls.hermes,
    "llama3_json": calls.llama3_json,
    "mistral": calls.mistral,
    "qwen3_xml": calls.qwen3_xml,
    "deepseek_v3": calls.deepseek_v3,
    "pythonic": calls.pythonic,
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


@dataclass(frozen=True, slots=True)
class Reading:
    """How a request wants its answer read.

    schemas    those of the arguments of the tools that may be called, by name; none: no calls
    is_forced  a grammar holds the answer to be calls
    """

    schemas: Mapping[str, JsonObject] = field(default_factory=dict)
    is_forced: bool = False

    def reader(self, markup: Markup | None) -> TextReader:
        """Return a reader of one completion. Its markup is None from an older worker."""
        parser = self._parser(markup or Markup("hermes"))
        return PlainText() if parser is calls.content else MarkupReader(parser, self.schemas)

    def _parser(self, markup: Markup) -> Parser:
        parser: Parser = calls.content
        if self.is_forced:
            parser = calls.forced
        elif "openai" in (markup.calls, markup.reasoning) or markup.reasoning == "openai_gptoss":
            return channels
        elif self.schemas:
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
