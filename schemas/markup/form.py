"""Forms in which models write: each makes a parser that reads it, and a tag that holds to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from penstock.schemas.markup.source import Source, Steps

Format = dict[str, JsonValue]  # a part of a structural tag


class Tool(NamedTuple):
    """A tool that may be called: the schema of its arguments, and the format that holds them."""

    name: str
    schema: Format
    arguments: Format


@dataclass(frozen=True, slots=True)
class CallTags:
    """The calls that an answer may have: a begun one is held to its tool, text around is free.

    is_forced  nothing but calls, at least one
    is_single  not more than one
    has_mark   returns whether the tokenizer has a mark as one token
    """

    tools: Sequence[Tool]
    is_forced: bool
    is_single: bool
    has_mark: Callable[[str], bool]

    def tags(self, head: Callable[[str], str], end: str, **fields: JsonValue) -> list[Format]:
        """Return a tag for each tool; `head` returns what stands before the arguments."""
        return [tag(head(tool.name), {**tool.arguments, **fields}, end) for tool in self.tools]

    def among(self, tags: Sequence[Format], trigger: str, separator: str | None = None) -> Format:
        """Return the format of calls among text, or of nothing but calls.

        separator  is between two calls; None: the one tag has all calls
        """
        if self.is_forced:
            return tags[0] if separator is None else self.listed(tags, separator)
        is_one = self.is_single or separator is None
        calls: Format = {"triggers": [trigger], "tags": [*tags], "stop_after_first": is_one}
        return {"type": "triggered_tags", **calls}

    def listed(self, tags: Sequence[Format], separator: str) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": [*tags],
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": self.is_single,
        }


@dataclass(frozen=True)
class Form:
    """A row of `penstock.schemas.markup.forms`. This one has no calls.

    marks    every mark, what begins a call or thinking first; those that are special tokens too
    signs    what is in a chat template that teaches the form: any of these
    aliases  other names of its parser
    """

    marks: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def read(self, source: Source) -> Steps[None]:
        """Read the text of a completion."""
        yield from source.rest(source.content)

    def held(self, calls: CallTags) -> Format | None:
        """Return the format of an answer with calls; None where it is not held to one."""
        return None


@dataclass(frozen=True)
class ThinkingMarks(Form):
    """Thinking between two marks. A call ends it too, where calls are read.

    is_always  every answer begins with thinking, though not always with the mark
    """

    is_always: bool = False

    def read_before(self, source: Source, calls: Form, is_open: bool) -> Steps[None]:
        """Read thinking, which the prompt may have begun, and then calls."""
        begin, end = self.marks
        if (yield from source.skip(begin)) or is_open:
            mark = yield from source.upto((end, *calls.marks[:1]), source.reasoning)
            if mark != end:
                source.put_back(mark)
        yield from calls.read(source)

    def held_before(
        self, form: Format | None, calls: Form, is_open: bool, budget: int | None
    ) -> Format:
        """Return a format in which thinking comes first, which has an end and perhaps a budget."""
        begin, end = self.marks
        thought: Format = {"type": "any_text"}
        if calls.marks:  # it would be read as a call, and is not held there
            thought["excludes"] = [calls.marks[0]]
        if budget is not None:
            thought["max_tokens"] = budget
        first = tag("" if is_open else begin, thought, end)
        if form is not None:
            between: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}
            first = {"type": "sequence", "elements": [first, between]}
        if not is_open:
            first = {"type": "optional", "content": first}
        return {"type": "sequence", "elements": [first, form or {"type": "any_text"}]}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
