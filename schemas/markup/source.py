"""The text of a completion as it comes, for parsers that are written as if all of it were there.

A parser is a generator: where it needs more text than there is, it yields. It puts what it found
into a `Found`, as early as it is certain. Text that could be the beginning of a mark is held until
it is known, so no piece of a mark is ever shown.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import JsonValue

from penstock.schemas.markup.json_scan import JsonScan

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], object]
Schemas = Mapping[str, dict[str, JsonValue]]


@dataclass(slots=True)
class CallPiece:
    """A piece of a call: its first one has its name, and the arguments of all are joined."""

    number: int
    name: str | None
    arguments: str = ""


def joined(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Return each call as one piece."""
    calls: list[CallPiece] = []
    for piece in pieces:
        if piece.name is None:
            calls[-1].arguments += piece.arguments
        else:
            calls.append(piece)
    return calls


@dataclass(slots=True)
class Found:
    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


def whole(parts: Sequence[Found]) -> Found:
    """Return what was found in all parts of a text."""
    content = "".join(part.content for part in parts)
    reasoning = "".join(part.reasoning for part in parts)
    return Found(content, reasoning, joined(piece for part in parts for piece in part.calls))


class Source:
    """The text that a parser has not read yet, and what it found since it was last asked.

    schemas  what the arguments of each tool may be, by the tools' names
    """

    def __init__(self, schemas: Schemas) -> None:
        self.text = ""
        self.num_read = 0  # characters before `text`
        self.is_over = False
        self.schemas = schemas
        self.num_calls = 0
        self._findings = Found()
        self._thought = _Trimmed(True)
        self._content = _Trimmed(False)

    def taken(self) -> Found:
        findings, self._findings = self._findings, Found()
        return findings

    def content(self, text: str) -> None:
        """Add content. White space before a call is not shown, nor after the last one."""
        self._findings.content += self._content.add(text)

    def reasoning(self, text: str) -> None:
        """Add thinking. White space around it is not shown."""
        self._findings.reasoning += self._thought.add(text)
        self._content.begins = True

    def call(self, name: str) -> None:
        """Begin a call. What `arguments` adds belongs to the call begun last."""
        self._findings.calls.append(CallPiece(self.num_calls, name))
        self.num_calls += 1
        self._content.blank = ""

    def arguments(self, text: str) -> None:
        if not self._findings.calls:
            self._findings.calls.append(CallPiece(self.num_calls - 1, None))
        self._findings.calls[-1].arguments += text

    def end(self) -> None:
        """Show the white space at the end, if no call came."""
        if not self.num_calls:
            self._findings.content += self._content.blank

    def drop(self, text: str) -> None:
        pass

    def upto(self, marks: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Read up to the next of the marks and over it, and return it; "" at the text's end.

        The text before it goes to `emit`, as soon as it is certain.
        """
        find = re.compile("|".join(map(re.escape, marks))).search
        while True:
            if mark := find(self.text):
                emit(self.take(mark.start()))
                return self.take(len(mark[0]))
            if self.is_over:
                emit(self.take(len(self.text)))
                return ""
            emit(self.take(len(self.text) - _num_begun(self.text, marks)))
            yield

    def name_upto(self, marks: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Read a name and the mark after it; where the text ends before the mark, it is ""."""
        name: list[str] = []
        mark = yield from self.upto(marks, name.append)
        return "".join(name), mark

    def skip(self, mark: str) -> Steps[bool]:
        """Read over the mark and white space before it; return False where something else is."""
        while True:
            blank = self._num_blank
            if self.text.startswith(mark, blank):
                self.take(blank + len(mark))
                return True
            rest = self.text[blank:]
            if self.is_over or not mark.startswith(rest):
                return False
            yield

    def next_sign(self) -> Steps[str]:
        """Return the next character that is no white space, without reading it; "" at the end."""
        while not (self.text.strip() or self.is_over):
            yield
        return self.text.lstrip()[:1]

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Read one JSON value, and give its text to `emit` as it comes.

        Return False where the text ends before it, or goes on as no JSON does.
        """
        yield from self.next_sign()
        self.take(self._num_blank)
        scan = JsonScan()
        while True:
            emit(self.take(scan.feed(self.text)))
            if scan.is_over or self.is_over:
                return scan.is_whole
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Read all text that is left, and give it to `emit` as it comes."""
        while True:
            emit(self.take(len(self.text)))
            if self.is_over:
                return
            yield

    @property
    def _num_blank(self) -> int:
        return len(self.text) - len(self.text.lstrip())

    def take(self, count: int) -> str:
        """Read so many characters and return them."""
        text, self.text = self.text[:count], self.text[count:]
        self.num_read += len(text)
        return text

    def put_back(self, text: str) -> None:
        """Have a text, which was the last to be read, to be read again."""
        self.text = text + self.text
        self.num_read -= len(text)


Parser = Callable[[Source], Steps[object]]


class MarkupReader:
    """Reads the text of one completion, piece by piece, by a parser."""

    def __init__(self, parser: Parser, schemas: Schemas) -> None:
        self._source = Source(schemas)
        self._steps: Iterator[None] = parser(self._source)

    def feed(self, text: str) -> Found:
        self._source.text += text
        next(self._steps, None)
        return self._source.taken()

    def finish(self) -> Found:
        self._source.is_over = True
        next(self._steps, None)
        self._source.end()
        return self._source.taken()


@dataclass(slots=True)
class _Trimmed:
    """Gives a text on without the white space at its end, and where it `begins`."""

    begins: bool
    blank: str = ""

    def add(self, text: str) -> str:
        if self.begins:
            text = text.lstrip()
            self.begins = not text
        text = self.blank + text
        head = text.rstrip()
        self.blank = text[len(head) :]
        return head


def _num_begun(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the text's end may begin one of the marks."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next(
        (size for size in range(longest, 0, -1) if any(m.startswith(text[-size:]) for m in marks)),
        0,
    )
