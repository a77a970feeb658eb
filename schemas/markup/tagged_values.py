"""Calls with a tag for each argument, whose value is text where the tool's schema says so."""

from dataclasses import dataclass

from pydantic import JsonValue

from penstock.schemas.markup.form import CallTags, Form, Format
from penstock.schemas.markup.json_scan import json_of, parsed
from penstock.schemas.markup.source import Source, Steps


@dataclass(frozen=True, kw_only=True)
class TaggedValues(Form):
    """Two marks with a tool's name between, and then keys with their values.

    name   what stands before and after the name, and after the last value
    key    what stands before and after a key, and after its value
    pad    around a value
    style  the name that structural tags have for the keys and values
    """

    name: tuple[str, str, str]
    key: tuple[str, str, str]
    pad: str = ""
    style: str

    def read(self, source: Source) -> Steps[None]:
        (begin, end), (before, after, _) = self.marks, self.name
        while mark := (yield from source.upto((begin, before), source.content)):
            if mark == begin and not (yield from source.skip(before)):
                source.content(begin)
                continue
            name, mark = yield from source.name_upto((after, "\n"))
            if mark != after:
                source.content(before + name + mark)
            else:
                name = name.strip()
                source.call(name)
                yield from self._arguments(source, source.schemas.get(name, {}))
                yield from source.skip(end)

    def held(self, calls: CallTags) -> Format:
        (begin, end), (before, after, last) = self.marks, self.name
        head = f"{begin}\n{before}"
        ways = calls.tags(lambda name: f"{head}{name}{after}\n", f"{last}\n{end}", style=self.style)
        return calls.among(ways, begin, "\n")

    def _arguments(self, source: Source, schema: Format) -> Steps[None]:
        (before, after, end), last = self.key, self.name[2]
        properties, between = schema.get("properties"), "{"
        mark = yield from source.upto((before, last), source.drop)
        while mark == before:
            key = (yield from source.name_upto((after,)))[0].strip()
            text, mark = yield from source.name_upto((end, before, last))
            text = text.removeprefix(self.pad).removesuffix(self.pad)
            own = properties.get(key) if isinstance(properties, dict) else None
            source.arguments(f"{between}{json_of(key)}: {json_of(_value(text, own))}")
            between = ", "
            if mark == end:
                mark = yield from source.upto((before, last), source.drop)
        source.arguments("{}" if between == "{" else "}")


def _value(text: str, schema: JsonValue) -> JsonValue:
    """Return the value that a text stands for: itself, where it may be a text or is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(schema, dict) and "enum" in schema and kind is None):
        return text
    return parsed(text, text)
