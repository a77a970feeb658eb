"""The calls of tools as structural tags, in the forms in which models write them.

A begun call is held to its tool's schema; text around calls is free. Sources: the models' chat
templates.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from penstock.schemas.api.closed_schema import closed_arguments
from penstock.schemas.wire.markup import MARKS, CallFormat

Format = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called."""

    name: str
    schema: Format
    is_strict: bool = False

    @property
    def arguments(self) -> Format:
        """Return the format of the arguments. If it is not strict, it is held as far as it can."""
        form: Format = {"type": "json_schema", "json_schema": closed_arguments(self.schema)}
        return form if self.is_strict else {**form, "lenient": True}


@dataclass(frozen=True, slots=True)
class CallTags:
    """The calls that an answer may have.

    is_forced  nothing but calls, at least one
    is_single  not more than one
    has_mark   returns whether the tokenizer has a mark as one token
    """

    tools: Sequence[CallableTool]
    is_forced: bool
    is_single: bool
    has_mark: Callable[[str], bool]

    def format(self, kind: CallFormat | None) -> Format | None:
        """Return the format of an answer with calls; None of a form that is not held."""
        if kind in ("hermes", "qwen3_xml"):
            begin, end = MARKS[kind]
            write = self._hermes if kind == "hermes" else self._qwen3_xml
            return self._among([write(tool, begin, end) for tool in self.tools], begin, "\n")
        if kind == "llama3_json":
            return self._bare()
        if kind == "mistral":
            return self._mistral()
        if kind == "deepseek_v3":
            return self._deepseek()
        return None

    def as_json(self) -> Format:
        """Return the schema of an answer that is one call as JSON, or a list of some."""
        shared: Format = {}
        for tool in self.tools:
            own = tool.schema.get("$defs")
            shared |= own if isinstance(own, dict) else {}
        form: Format = {"anyOf": [self._object(tool) for tool in self.tools]}
        if not self.is_single:
            form = {"type": "array", "items": form, "minItems": 1}
        return {**form, "$defs": shared} if shared else form

    @staticmethod
    def _object(tool: CallableTool) -> Format:
        # References in a tool's schema begin at its root, so its definitions move to the new root.
        closed = closed_arguments(tool.schema)
        given = closed.items() if isinstance(closed, dict) else ()
        return {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": {name: part for name, part in given if name != "$defs"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    def _among(self, tags: list[Format], trigger: str, separator: str) -> Format:
        """Return the format of calls among text, or of nothing but calls."""
        if self.is_forced:
            return self._listed(tags, separator)
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [*tags],
            "stop_after_first": self.is_single,
        }

    def _listed(self, tags: list[Format], separator: str) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": [*tags],
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": self.is_single,
        }

    @staticmethod
    def _hermes(tool: CallableTool, begin: str, end: str) -> Format:
        head = f'{begin}\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return _tag(head, tool.arguments, f"}}\n{end}")

    @staticmethod
    def _qwen3_xml(tool: CallableTool, begin: str, end: str) -> Format:
        form = {**tool.arguments, "style": "qwen_xml"}
        return _tag(f"{begin}\n<function={tool.name}>\n", form, f"</function>\n{end}")

    def _bare(self) -> Format:
        """Return the format of bare JSON, which an answer that begins with a bracket is."""
        head = '{{"name": {}, "parameters": '
        tags = [_tag(head.format(json.dumps(t.name)), t.arguments, "}") for t in self.tools]
        (mark,) = MARKS["llama3_json"]
        begun: Format = {"type": "optional", "content": {"type": "const_string", "value": mark}}
        calls = self._listed(tags, "; ")
        if self.has_mark(mark):
            calls = {"type": "sequence", "elements": [begun, calls]}
        if self.is_forced:
            return calls
        text: Format = {"type": "regex", "pattern": r"([^{](.|\n)*)?"}
        return {"type": "or", "elements": [text, calls]}

    def _mistral(self) -> Format:
        begin, _, args = MARKS["mistral"]
        if self.has_mark(args):  # tokenizers since version 11
            tags = [_tag(f"{begin}{tool.name}{args}", tool.arguments, "") for tool in self.tools]
            return self._among(tags, begin, "")
        head = '{{"name": {}, "arguments": '
        tags = [_tag(head.format(json.dumps(t.name)), t.arguments, "}") for t in self.tools]
        space: Format = {"type": "regex", "pattern": " ?"}
        listed = _tag("[", self._listed(tags, ", "), "]")
        one = _tag(begin, {"type": "sequence", "elements": [space, listed]}, "")
        return one if self.is_forced else {
            "type": "triggered_tags", "triggers": [begin], "tags": [one], "stop_after_first": True
        }  # fmt: skip

    def _deepseek(self) -> Format:
        begin, call, middle, end, last = MARKS["deepseek_v3"]
        newer = [_tag(f"{call}{t.name}{middle}", t.arguments, end) for t in self.tools]
        older = [
            _tag(f"{call}function{middle}{t.name}\n```json\n", t.arguments, f"\n```{end}")
            for t in self.tools
        ]
        either: Format = {
            "type": "or",
            "elements": [self._listed(newer, ""), self._listed(older, "\n")],
        }
        calls = _tag(begin, either, last)
        return calls if self.is_forced else {
            "type": "triggered_tags", "triggers": [begin], "tags": [calls], "stop_after_first": True
        }  # fmt: skip


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
