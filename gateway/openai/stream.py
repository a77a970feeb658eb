"""Rendering of events as the chunks of OpenAI's streams, straight to bytes.

What is constant is rendered once for a stream; a token costs one string escape and one join.
Each choice opens with its role or its echo, and closes with an empty piece that has the finish
reason.
"""

from collections.abc import Iterator
from json.encoder import encode_basestring_ascii

from pydantic_core import to_json

from penstock.gateway.follow.resumable import START, ReaderPosition, ResumableStream
from penstock.gateway.markup.reader import TextReader
from penstock.gateway.openai.responses import (
    AnswerContext,
    TextLogprobs,
    chat_logprobs,
    finish_reason,
    metrics,
    tool_call,
    usage,
)
from penstock.gateway.openai.responses import error as shown_error
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import Delta, Done, Failed, FinishReason, TokenLogprob, Usage
from penstock.schemas.markup.source import Found

DONE = b"data: [DONE]\n\n"


class StreamRenderer(ResumableStream):
    """Renders the chunks of one stream. A subclass says what a choice looks like."""

    prefix = ""
    kind = ""
    tells_prompt_once = False  # the ids of a prompt beside the choices, not in each

    def __init__(self, form: AnswerContext, position: ReaderPosition = START) -> None:
        super().__init__(form.job.job_id, position)
        self.form = form
        self._head = b"data: " + to_json(self.head())[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if form.options.include_usage else b"]}\n\n"
        self._opened_choices: set[int] = set()
        self._closed_choices: set[int] = set()
        self._prompt_tokens: dict[int, int] = {}  # prompt -> its tokens, once it has an answer

    def head(self) -> JsonObject:
        """Return what each chunk begins with."""
        return {
            "id": f"{self.prefix}-{self.form.job.job_id}",
            "object": self.kind,
            "created": self.form.created_s,
            "model": self.form.job.model,
            "system_fingerprint": self.form.system_fingerprint,
        }

    def ending(self, event: Done) -> bytes:
        last = b"".join(self._ends(event, event.finish_reason)) if event.finish_reason else b""
        fields = metrics(self.form, event.timing, event.usage)
        if self.form.options.include_usage:
            fields["usage"] = usage(event.usage)
        if not fields:
            return last + DONE
        return last + self._head + b"]," + to_json(fields)[1:] + b"\n\n" + DONE

    def render_error(self, error: Failed) -> bytes:
        return b"data: " + to_json(shown_error(error.error)) + b"\n\n" + DONE

    def _ends(self, event: Done, reason: FinishReason) -> Iterator[bytes]:
        """Yield the closing chunks of the choices that no delta ended."""
        for index in range(self.form.job.num_choices):
            if index not in self._closed_choices:
                yield from self.chunks(Delta(event.position, [], index, finish_reason=reason))

    def chunks(self, event: Delta) -> list[bytes]:
        heads = []
        if event.index not in self._opened_choices:
            self._opened_choices.add(event.index)
            heads = self.opening(event)
        choices = [*heads, *self.pieces(event)]
        if event.finish_reason:
            self._closed_choices.add(event.index)
            choices.append(self.closing(event))
        tail = before = self._tail
        options = self.form.options
        if options.include_usage and options.continuous_usage_stats:
            if event.prompt_tokens is not None:
                self._prompt_tokens[event.index // self.form.job.params.n] = event.prompt_tokens
            num_prompt = sum(self._prompt_tokens.values())
            before, tail = (
                _usage_tail(Usage(prompt_tokens=num_prompt, completion_tokens=count))
                for count in (event.position, event.end)
            )
        tails = [before] * len(heads) + [tail] * (len(choices) - len(heads))
        chunks = [
            self._head + choice.encode() + suffix
            for choice, suffix in zip(choices, tails, strict=True)
        ]
        if self.tells_prompt_once and self.form.shows_ids and event.prompt_ids is not None:
            ids = b'],"prompt_token_ids":' + _ids(event.prompt_ids).encode() + tails[0][1:]
            chunks[0] = self._head + choices[0].encode() + ids
        return chunks

    def opening(self, event: Delta) -> list[str]:
        """Return what goes before the event, the first one of its choice."""
        raise NotImplementedError

    def pieces(self, event: Delta) -> list[str]:
        raise NotImplementedError

    def closing(self, event: Delta) -> str:
        raise NotImplementedError


class ChatChunks(StreamRenderer):
    prefix = "chatcmpl"
    kind = "chat.completion.chunk"
    tells_prompt_once = True

    def __init__(self, form: AnswerContext, position: ReaderPosition = START) -> None:
        super().__init__(form, position)
        self._readers: dict[int, TextReader] = {}
        self._num_calls = [0] * form.job.num_choices

    def opening(self, event: Delta) -> list[str]:
        choices = [_chat_choice(event.index, '{"role":"assistant","content":""}')]
        if echo := self.form.echo_of(event.index, None):
            choices.append(_chat_choice(event.index, f'{{"content":{_quote(echo)}}}'))
        return choices

    def pieces(self, event: Delta) -> list[str]:
        reader = self._readers.get(event.index)
        if reader is None:
            reader = self._readers[event.index] = self.form.parser.reader(event.markup)
        pieces = self._pieces_of(event.index, reader.feed(event.text), event.logprobs)
        if event.finish_reason:
            pieces += self._pieces_of(event.index, reader.finish(), None)
        if self.form.shows_ids and event.token_ids:  # with the last that they gave, or nothing
            *pieces, last = pieces or [_chat_choice(event.index, "{}")]
            pieces.append(f'{last[:-1]},"token_ids":{_ids(event.token_ids)}}}')
        return pieces

    def closing(self, event: Delta) -> str:
        reason = finish_reason(self.form, event.finish_reason, self._num_calls[event.index])
        end = finish_json(reason, event.stop_reason, event.schema_error)
        return _chat_choice(event.index, "{}", "null", end)

    def _pieces_of(
        self, index: int, answer: Found, logprobs: list[TokenLogprob] | None
    ) -> list[str]:
        pieces = []
        if answer.reasoning and self.form.shows_reasoning:
            text = _quote(answer.reasoning)
            pieces.append(_chat_choice(index, f'{{"reasoning":{text},"reasoning_content":{text}}}'))
        if answer.content or logprobs:
            scores = to_json(chat_logprobs(self.form, logprobs)).decode() if logprobs else "null"
            pieces.append(_chat_choice(index, f'{{"content":{_quote(answer.content)}}}', scores))
        for piece in answer.calls:
            self._num_calls[index] = piece.number + 1
            call = tool_call(self.form, index, piece)
            delta: JsonObject = {"tool_calls": [{"index": piece.number, **call}]}
            if self.form.calls_functions:
                delta = {"function_call": call["function"]}
            pieces.append(_chat_choice(index, to_json(delta).decode()))
        return pieces


class TextChunks(StreamRenderer):
    prefix = "cmpl"
    kind = "text_completion"

    def __init__(self, form: AnswerContext, position: ReaderPosition = START) -> None:
        super().__init__(form, position)
        self._logprobs = [TextLogprobs(form) for _ in range(form.job.num_choices)]

    def opening(self, event: Delta) -> list[str]:
        index, scores = event.index, event.prompt_logprobs
        echo, more = self.form.echo_of(index, scores), ""
        logprobs = to_json(self._logprobs[index].echo(index, scores)).decode()
        if self.form.shows_ids:
            more = f',"prompt_token_ids":{_ids(event.prompt_ids or [])}'
        return (
            [_text_choice(index, echo, logprobs, more=more)]
            if echo or more or logprobs != "null"
            else []
        )

    def pieces(self, event: Delta) -> list[str]:
        if self.form.hides_completion:
            return []
        more = ""
        if self.form.shows_ids and event.token_ids:
            more = f',"token_ids":{_ids(event.token_ids)}'
        if not (event.text or event.logprobs or more):
            return []
        logprobs = "null"
        if event.logprobs:
            logprobs = to_json(self._logprobs[event.index].next(event.logprobs)).decode()
        return [_text_choice(event.index, event.text, logprobs, more=more)]

    def closing(self, event: Delta) -> str:
        end = self.form.shown_end(event.finish_reason, event.stop_reason)
        return _text_choice(event.index, "", "null", finish_json(*end, event.schema_error))


# A text as a JSON string in ASCII: all else is escaped, because some readers of SSE break lines at
# every Unicode line end.
_quote = encode_basestring_ascii
NO_FINISH = '"finish_reason":null'


def _chat_choice(index: int, delta: str, logprobs: str = "null", finish: str = NO_FINISH) -> str:
    return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},{finish}}}'


def _text_choice(
    index: int, text: str, logprobs: str = "null", finish: str = NO_FINISH, more: str = ""
) -> str:
    return f'{{"index":{index},"text":{_quote(text)},"logprobs":{logprobs},{finish}{more}}}'


def _ids(token_ids: list[int]) -> str:
    return to_json(token_ids).decode()


def finish_json(
    reason: str | None, stop_reason: int | str | None, schema_error: str | None = None
) -> str:
    stop = to_json(stop_reason).decode()
    error_field = "" if schema_error is None else f',"schema_error":{_quote(schema_error)}'
    return f'"finish_reason":"{reason}","stop_reason":{stop}{error_field}'


def _usage_tail(count: Usage) -> bytes:
    return b'],"usage":' + to_json(usage(count)) + b"}\n\n"
