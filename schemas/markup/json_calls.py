"""Forms of calls whose arguments are JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from penstock.schemas.markup.form import CallTags, Form, Format, tag
from penstock.schemas.markup.json_scan import JsonScan, json_of, parsed
from penstock.schemas.markup.source import Source, Steps

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s"])'
)
_ARGUMENTS = ("arguments", "parameters")
MAX_HEAD = 1000  # characters of a call before its arguments, if they are to come piece by piece


@dataclass(frozen=True, kw_only=True)
class MarkedJson(Form):
    """Objects with a name and arguments between two marks, of which the second may be "".

    key      of the arguments, as its models write it
    pad      between a mark and an object
    between  two objects
    is_list  a list of objects is between the marks
    is_bare  an object that has arguments may be a call without the mark
    """

    key: str = "arguments"
    pad: str = ""
    between: str
    is_list: bool = False
    is_bare: bool = False

    def read(self, source: Source) -> Steps[None]:
        begin, end = self.marks[:2]
        begins = (begin, "{") if self.is_bare else (begin,)
        while mark := (yield from source.upto(begins, source.content)):
            if mark == "{":
                source.put_back(mark)
            if self.is_list and (yield from source.skip("[")):
                yield from _listed_calls(source, end)
            elif (no_call := (yield from self._call(source))) is not None:
                source.content(no_call if self.is_bare else mark + no_call)

    def held(self, calls: CallTags) -> Format:
        begin, end = self.marks[:2]
        if not (self.is_bare or self.is_list):
            head = f"{begin}{self.pad}"
            tags = calls.tags(lambda name: head + self._head(name), f"}}{self.pad}{end}")
            return calls.among(tags, begin, self.between)
        objects = calls.listed(calls.tags(self._head, "}"), self.between)
        if self.is_list:
            space: Format = {"type": "regex", "pattern": " ?"}
            array: Format = {"type": "sequence", "elements": [space, tag("[", objects, "]")]}
            return calls.among([tag(begin, array, end)], begin)
        if calls.has_mark(begin):
            mark: Format = {"type": "const_string", "value": begin}
            optional: Format = {"type": "optional", "content": mark}
            objects = {"type": "sequence", "elements": [optional, objects]}
        text: Format = {"type": "regex", "pattern": r"([^{](.|\n)*)?"}
        return objects if calls.is_forced else {"type": "or", "elements": [text, objects]}

    def _call(self, source: Source) -> Steps[str | None]:
        """Read a call after its mark. Return the text if it is none."""
        no_call = yield from json_call(source, self.is_bare)
        if no_call is None:
            yield from source.skip(self.marks[1] or self.between.strip())
        return no_call

    def _head(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.key}": '


class NamedJson(MarkedJson):
    """A name, perhaps with an id after a mark, and arguments after another; or such objects."""

    def held(self, calls: CallTags) -> Format:
        begin, _, _, args = self.marks
        if not calls.has_mark(args):  # its tokenizer is of a time without it
            return super().held(calls)
        return calls.among(calls.tags(lambda name: f"{begin}{name}{args}", ""), begin, "")

    def _call(self, source: Source) -> Steps[str | None]:
        _, _, call_id, args = self.marks
        name, mark = yield from source.name_upto((call_id, args, "{"))
        if mark == call_id:
            mark = yield from source.upto((args,), source.drop)
        if mark == "{":
            source.put_back(mark)
        if not mark:
            return name
        source.call(name.strip())
        yield from source.json_value(source.arguments)
        return None


class DeepSeek(Form):
    """A kind, a name and fenced JSON. Since V3.1 there is neither a kind nor a fence."""

    def read(self, source: Source) -> Steps[None]:
        begin, call, middle, end, last = self.marks
        while (yield from source.upto((begin,), source.content)):
            while (yield from source.upto((call, last), source.drop)) == call:
                name, mark = yield from source.name_upto((middle,))
                if name.strip() == "function":
                    name, mark = yield from source.name_upto(("\n",))
                    yield from source.skip("```json")
                if mark:
                    source.call(name.strip())
                    yield from source.json_value(source.arguments)
                    yield from source.upto((end,), source.drop)

    def held(self, calls: CallTags) -> Format:
        begin, call, middle, end, last = self.marks
        newer = calls.tags(lambda name: f"{call}{name}{middle}", end)
        fence = "\n```json\n", f"\n```{end}"
        older = calls.tags(lambda name: f"{call}function{middle}{name}{fence[0]}", fence[1])
        ways: list[JsonValue] = [calls.listed(newer, ""), calls.listed(older, "\n")]
        return calls.among([tag(begin, {"type": "or", "elements": ways}, last)], begin)


class ForcedJson(Form):
    """One call or a list of calls, to which a grammar holds the answer."""

    def read(self, source: Source) -> Steps[None]:
        yield from source.skip("[")
        yield from _listed_calls(source)

    def held(self, calls: CallTags) -> Format:
        all_definitions: Format = {}
        objects: list[JsonValue] = []
        for name, own, arguments in calls.tools:
            # References in a tool's schema begin at its root, so definitions move to the new one.
            definitions, closed_schema = own.get("$defs"), arguments["json_schema"]
            all_definitions |= definitions if isinstance(definitions, dict) else {}
            parts = closed_schema.items() if isinstance(closed_schema, dict) else ()
            schema = {key: part for key, part in parts if key != "$defs"}
            call: Format = {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            objects.append(call)
        form: Format = {"anyOf": objects}
        if not calls.is_single:
            form = {"type": "array", "items": form, "minItems": 1}
        lenient = all("lenient" in tool.arguments for tool in calls.tools)
        form |= {"$defs": all_definitions} if all_definitions else {}
        return {"type": "json_schema", "json_schema": form, "lenient": lenient}


def _listed_calls(source: Source, end: str = "") -> Steps[None]:
    """Read calls with commas between, and what follows the last one as content."""
    while (no_call := (yield from json_call(source))) is None:
        if not (yield from source.skip(",")):
            yield from source.skip("]")
            if end:
                yield from source.skip(end)
            break
    source.content(no_call or "")
    yield from source.rest(source.content)


def json_call(source: Source, needs_arguments: bool = False) -> Steps[str | None]:
    """Read a call that is one JSON object. Return the text if it is none.

    Where the name comes first, the arguments are given on as they come.

    needs_arguments  no mark says that it is a call, so an object with a name alone is none
    """
    if (yield from source.next_sign()) != "{":
        return ""
    scan, place = JsonScan(), source.text.index("{")
    while True:
        head = _HEAD.match(source.text[:MAX_HEAD]) if place <= MAX_HEAD else None
        if head and isinstance(name := parsed(head[1]), str):
            source.take(head.end())
            source.call(name)
            if (yield from source.json_value(source.arguments)):
                yield from source.skip("}")
            return None
        place += scan.feed(source.text[place:])
        if scan.is_over or source.is_over:
            break
        yield
    text = source.take(place)
    call = parsed(text.strip())
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return text
    if needs_arguments and call.keys().isdisjoint(_ARGUMENTS):
        return text
    source.call(name)
    source.arguments(_arguments(call))
    return None


def _arguments(call: Mapping[str, JsonValue]) -> str:
    arguments = next((call[key] for key in _ARGUMENTS if key in call), {})
    return arguments if isinstance(arguments, str) else json_of(arguments)
