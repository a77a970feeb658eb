"""Events as the chunks of OpenAI's streams, rendered straight to bytes.

What is constant is rendered once for a stream; a token costs one string escape and one join.
Each choice opens with its role or its echo, and closes with an empty piece that has the reason.
"""

from collections.abc import Iterator
from json.encoder import encode_basestring_ascii

from pydantic_core import to_json

from gateway.answers import (
    Form,
    TextLogprobs,
    chat_logprobs,
    error,
    finish_reason,
    tool_call,
    usage,
)
from gateway.tool_calls import Found
from schemas.event import Delta, Done, Failed, FinishReason, TokenLogprob, Usage
from schemas.openai import JsonObject

DONE = b"data: [DONE]\n\n"
Seen = tuple[int, int]  # tokens delivered, and chunks of the event after them


class Chunks:
    """The chunks of one stream. A subclass says what a choice looks like.

    A chunk's id is the number of tokens delivered with it; where its event has more chunks to come,
    those delivered before, a dot, and its number in the event. Who comes back with an id gets what
    follows: what goes before is rendered again, for its place in calls and choices, and not shown.
    """

    prefix = ""
    kind = ""

    def __init__(self, form: Form, seen: Seen = (0, 0)) -> None:
        self.form = form
        self._seen_tokens, self._seen_chunks = seen
        head: JsonObject = {
            "id": f"{self.prefix}-{form.job.job_id}",
            "object": self.kind,
            "created": form.created_s,
            "model": form.job.model,
        }
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if form.options.include_usage else b"]}\n\n"
        self._opened: set[int] = set()
        self._closed: set[int] = set()

    def render(self, event: Delta | Done | Failed) -> bytes:
        if isinstance(event, Delta):
            chunks = self._delta(event)
            if event.end <= self._seen_tokens:
                return b""
            if len(chunks) == 1:
                return b"id: %d\n%b" % (event.end, chunks[0])
            return b"".join(self._numbered(event, chunks))
        if isinstance(event, Failed):
            return b"data: " + to_json(error(event.error)) + b"\n\n" + DONE
        last = b"".join(self._ends(event, event.finish_reason)) if event.finish_reason else b""
        if not self.form.options.include_usage:
            return last + DONE
        return last + self._head + _usage_tail(event.usage) + DONE

    def _numbered(self, event: Delta, chunks: list[bytes]) -> Iterator[bytes]:
        num_seen = self._seen_chunks if event.position == self._seen_tokens else 0
        for number, chunk in enumerate(chunks, 1):
            if number == len(chunks):
                yield b"id: %d\n%b" % (event.end, chunk)
            elif number > num_seen:
                yield b"id: %d.%d\n%b" % (event.position, number, chunk)

    def _ends(self, event: Done, reason: FinishReason) -> Iterator[bytes]:
        """Of the choices that no delta of theirs ended."""
        for index in range(self.form.job.num_choices):
            if index not in self._closed:
                yield from self._delta(Delta(event.position, [], index, finish_reason=reason))

    def _delta(self, event: Delta) -> list[bytes]:
        choices = []
        if event.index not in self._opened:
            self._opened.add(event.index)
            choices += self.opening(event.index)
        choices += self.pieces(event)
        if event.finish_reason:
            self._closed.add(event.index)
            choices.append(self.closing(event))
        tail = self._tail
        if self.form.options.continuous_usage_stats:
            tail = _usage_tail(Usage(completion_tokens=event.end))
        return [self._head + choice.encode() + tail for choice in choices]

    def opening(self, index: int) -> list[str]:
        raise NotImplementedError

    def pieces(self, event: Delta) -> list[str]:
        raise NotImplementedError

    def closing(self, event: Delta) -> str:
        raise NotImplementedError


class ChatChunks(Chunks):
    prefix = "chatcmpl"
    kind = "chat.completion.chunk"

    def __init__(self, form: Form, seen: Seen = (0, 0)) -> None:
        super().__init__(form, seen)
        self._readers = [form.reader() for _ in range(form.job.num_choices)]
        self._num_calls = [0] * form.job.num_choices

    def opening(self, index: int) -> list[str]:
        return [_chat_choice(index, '{"role":"assistant","content":""}')]

    def pieces(self, event: Delta) -> list[str]:
        reader = self._readers[event.index]
        pieces = self._found(event.index, reader.feed(event.text), event.logprobs)
        if event.finish_reason:
            pieces += self._found(event.index, reader.finish(), None)
        return pieces

    def closing(self, event: Delta) -> str:
        reason = finish_reason(event.finish_reason, self._num_calls[event.index])
        return _chat_choice(event.index, "{}", "null", _finish(reason, event.stop_reason))

    def _found(self, index: int, found: Found, logprobs: list[TokenLogprob] | None) -> list[str]:
        pieces = []
        if found.content or logprobs:
            shown = to_json(chat_logprobs(logprobs)).decode() if logprobs else "null"
            pieces.append(_chat_choice(index, f'{{"content":{_quoted(found.content)}}}', shown))
        for call in found.calls:
            number = self._num_calls[index]
            self._num_calls[index] += 1
            shown_call = {"index": number, **tool_call(self.form, index, number, call)}
            delta = to_json({"tool_calls": [shown_call]}).decode()
            pieces.append(_chat_choice(index, delta))
        return pieces


class TextChunks(Chunks):
    prefix = "cmpl"
    kind = "text_completion"

    def __init__(self, form: Form, seen: Seen = (0, 0)) -> None:
        super().__init__(form, seen)
        self._logprobs = [
            TextLogprobs(form.echo_of(index)) for index in range(form.job.num_choices)
        ]

    def opening(self, index: int) -> list[str]:
        echo = self.form.echo_of(index)
        return [_text_choice(index, echo)] if echo else []

    def pieces(self, event: Delta) -> list[str]:
        if not event.text and not event.logprobs:
            return []
        shown = "null"
        if event.logprobs:
            shown = to_json(self._logprobs[event.index].next(event.logprobs)).decode()
        return [_text_choice(event.index, event.text, shown)]

    def closing(self, event: Delta) -> str:
        return _text_choice(
            event.index, "", "null", _finish(event.finish_reason, event.stop_reason)
        )


NO_FINISH = '"finish_reason":null'


def _chat_choice(index: int, delta: str, logprobs: str = "null", finish: str = NO_FINISH) -> str:
    return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},{finish}}}'


def _text_choice(index: int, text: str, logprobs: str = "null", finish: str = NO_FINISH) -> str:
    return f'{{"index":{index},"text":{_quoted(text)},"logprobs":{logprobs},{finish}}}'


def _finish(reason: str | None, stop_reason: int | str | None) -> str:
    stop = to_json(stop_reason).decode()
    return f'"finish_reason":"{reason}","stop_reason":{stop}'


def _usage_tail(count: Usage) -> bytes:
    return b'],"usage":' + to_json(usage(count)) + b"}\n\n"


def _quoted(text: str) -> str:
    """All but ASCII is escaped: some readers of SSE break lines at every Unicode line end."""
    return encode_basestring_ascii(text)
