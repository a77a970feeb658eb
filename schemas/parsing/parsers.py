"""Chooses the parser of a chat's completion: reasoning (thinking), tool calls and answer."""

from collections.abc import Mapping

from penstock.schemas.parsing import calls
from penstock.schemas.parsing.channels import channels
from penstock.schemas.parsing.source import Parser, Source, Steps
from penstock.schemas.wire.markup import MARKS, THINKING, Markup

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


def parser_of(markup: Markup) -> Parser:
    """Return the parser of a completion with these marks."""
    if "openai" in (markup.calls, markup.reasoning) or markup.reasoning == "openai_gptoss":
        return channels
    parser = _PARSERS[markup.calls]
    return _after_thinking(markup, parser) if markup.reasoning in THINKING else parser


def _after_thinking(markup: Markup, parser: Parser) -> Parser:
    """Return a parser that reads thinking first. A call ends it too, where calls are read."""
    begin, end = THINKING[markup.reasoning or ""]
    call = MARKS[markup.calls or ""][:1]

    def read(source: Source) -> Steps[None]:
        if (yield from source.skip(begin)) or markup.is_open:
            mark = yield from source.upto((end, *call), source.reasoning)
            if mark != end:
                source.put_back(mark)
        yield from parser(source)

    return read
