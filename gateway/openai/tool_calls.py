"""Finds the tool calls in a model's text while it streams.

Hermes-style models write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Text that
could be the beginning of a tag is held until it is certain, so no piece of a tag is ever shown;
text that turns out to be no call is shown unchanged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pydantic_core import from_json

from penstock.schemas.openai import ChatRequest, FunctionCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class Found:
    content: str = ""
    calls: list[FunctionCall] = field(default_factory=list)


class CallReader(Protocol):
    def feed(self, text: str) -> Found: ...
    def finish(self) -> Found: ...


class PlainText:
    """Reads text where no tools were given: everything is content."""

    def feed(self, text: str) -> Found:
        return Found(text)

    def finish(self) -> Found:
        return Found()


class TaggedCalls:
    """Reads text that has calls between tags and content around them."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._num_calls = 0

    def feed(self, text: str) -> Found:
        self._held += text
        found = Found()
        while self._call_ended(found) if self._inside else self._call_began(found):
            pass
        self._num_calls += len(found.calls)
        return found

    def finish(self) -> Found:
        if self._inside:
            return Found(OPEN + self._held)
        blank_after_call = self._num_calls and self._held.isspace()
        return Found("" if blank_after_call else self._held)

    def _call_began(self, found: Found) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if tag:
            found.content += before.rstrip()
            self._held, self._inside = after, True
            return True
        certain = self._certain(before)
        found.content += before[:certain]
        self._held = before[certain:]
        return False

    def _call_ended(self, found: Found) -> bool:
        inner, tag, after = self._held.partition(CLOSE)
        if not tag:
            return False
        if call := _parsed(inner):
            found.calls.append(call)
        else:
            found.content += OPEN + inner + CLOSE
        self._held, self._inside = after, False
        return True

    @staticmethod
    def _certain(text: str) -> int:
        """Return how many characters of the text are certainly content.

        A beginning of a tag at the end is not, nor is the white space before it.
        """
        sizes = range(min(len(OPEN), len(text)), 0, -1)
        num_tag = next((size for size in sizes if text.endswith(OPEN[:size])), 0)
        return len(text[: len(text) - num_tag].rstrip())


class ForcedCall:
    """Reads text that is one call and nothing else, because a grammar forced it."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> Found:
        self._held += text
        return Found()

    def finish(self) -> Found:
        call = _parsed(self._held)
        return Found(calls=[call]) if call else Found(self._held)


def _parsed(text: str) -> FunctionCall | None:
    try:
        call = from_json(text.strip(), allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return FunctionCall(name=name, arguments=arguments)


def reader_for(asked: ChatRequest) -> Callable[[], CallReader]:
    if asked.tool_choice == "none" or not asked.tools:
        return PlainText
    return TaggedCalls if asked.tool_choice == "auto" else ForcedCall
