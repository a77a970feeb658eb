"""What can be said of the gateway's parts for any input: whole and streamed answers agree."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.types import Message, Send

from penstock.gateway.admission.ask import Answering
from penstock.gateway.auth.access import Caller
from penstock.gateway.http.sse import EventStream
from penstock.gateway.markup.reader import Reading
from penstock.gateway.openai.responses import AnswerContext, chat_answer, text_answer
from penstock.gateway.openai.stream import START, ChatChunks, ReaderPosition, TextChunks
from penstock.schemas.api.openai import StreamOptions
from penstock.schemas.cursor import Had
from penstock.schemas.errors import QueueUnreachable, StreamDiverged
from penstock.schemas.event import Delta, Done, Event, FinishReason, Usage
from penstock.schemas.job import Job
from penstock.schemas.markup.forms import Markup
from penstock.schemas.result import fold
from penstock.schemas.wire.checksum import EMPTY, roll

WITH_TOOLS = Reading({"f": {}})
BITS = st.sampled_from(
    ["<think>", "</think>",
     "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "\n", " ", "a", "🙂", '"', "}",
     '{"name":"f","arguments":{"x":1}}', '\n{"name": "g", "arguments": "{}"}\n', '{"name":5}']
)  # fmt: skip


def answer_of(
    num_choices: int, texts: list[tuple[int, str]], markup: Markup | None = None
) -> list[Delta]:
    """Deltas of all choices in turn; each choice's last one ends it."""
    indexes = [index % num_choices for index, _ in texts]
    last = {index: at for at, index in enumerate(indexes)}
    made, checksum = list[Delta](), EMPTY
    for at, (index, (_, text)) in enumerate(zip(indexes, texts, strict=True)):
        checksum = roll(checksum, index, [at])
        reason: FinishReason | None = "stop" if last[index] == at else None
        own = markup if index not in indexes[:at] else None
        made.append(
            Delta(at, [at], index, text, finish_reason=reason, checksum=checksum, markup=own)
        )
    return made


def joined(deltas: list[Delta], at: int) -> list[Delta]:
    """With an event and the one after it as one, where they are of one choice."""
    one, other = deltas[at : at + 2]
    if one.index != other.index:
        return deltas
    both = replace(other, position=at, token_ids=[at, at + 1], text=one.text + other.text)
    return [*deltas[:at], both, *deltas[at + 2 :]]


def job_of(num_choices: int) -> Job:
    return Job.model_validate(
        {"job_id": "job_x", "model": "m", "prompts": ["p"], "params": {"n": num_choices}}
    )


ANSWERS = st.tuples(
    st.integers(1, 3), st.lists(st.tuples(st.integers(0, 2), BITS), min_size=3, max_size=15)
)
DONE = Done(position=15, usage=Usage(prompt_tokens=1, completion_tokens=9))


def streamed(chunks: ChatChunks | TextChunks, events: list[Event]) -> list[dict[str, object]]:
    """The choices of every chunk, in order."""
    raw = b"".join(chunks.render(event) for event in events).decode("ascii").split("\n\n")
    assert raw[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(line.partition("data: ")[2]) for line in raw[:-2]]
    return [choice for chunk in parsed for choice in chunk["choices"]]


MARKUPS = st.sampled_from([None, Markup("hermes", "qwen3"), Markup("hermes", "qwen3", True)])


@given(ANSWERS, MARKUPS)
def test_a_streamed_chat_is_the_whole_chat(
    answer: tuple[int, list[tuple[int, str]]], markup: Markup | None
) -> None:
    deltas = answer_of(*answer, markup)
    job = job_of(answer[0])
    form = AnswerContext(job, StreamOptions(), WITH_TOOLS)
    whole = json.loads(
        json.dumps(chat_answer(form, fold(job.job_id, job.model, job.num_choices, deltas, DONE)))
    )
    choices = streamed(ChatChunks(form), [*deltas, DONE])
    for choice in whole["choices"]:
        own = [each for each in choices if each["index"] == choice["index"]]
        if not own:
            continue  # a choice that never had a token
        said = [each["delta"] for each in own]
        content = "".join(delta.get("content") or "" for delta in said)  # type: ignore[attr-defined]
        thought = "".join(delta.get("reasoning") or "" for delta in said)  # type: ignore[attr-defined]
        assert thought == choice["message"].get("reasoning", "")
        pieces = [piece for delta in said for piece in delta.get("tool_calls", [])]  # type: ignore[attr-defined]
        calls = list[dict[str, object]]()
        for piece in pieces:
            if "id" in piece:
                calls.append(piece)
            else:
                assert piece["index"] == len(calls) - 1 and piece.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]  # type: ignore[index]
        assert said[0] == {"role": "assistant", "content": ""} and said[-1] == {}
        assert content == (choice["message"]["content"] or "")
        numbered = enumerate(choice["message"].get("tool_calls", []))
        assert calls == [{"index": number, **call} for number, call in numbered]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


@given(ANSWERS)
def test_a_streamed_completion_is_the_whole_one(answer: tuple[int, list[tuple[int, str]]]) -> None:
    deltas = answer_of(*answer)
    job = job_of(answer[0])
    form = AnswerContext(job, StreamOptions(), echo=["echo: "])
    whole = text_answer(form, fold(job.job_id, job.model, job.num_choices, deltas, DONE))
    choices = streamed(TextChunks(form), [*deltas, DONE])
    for index in {delta.index for delta in deltas}:
        text = "".join(str(each["text"]) for each in choices if each["index"] == index)
        assert text == whole["choices"][index]["text"]  # type: ignore[index, call-overload]


@given(ANSWERS, st.sampled_from([ChatChunks, TextChunks]))
def test_from_each_id_of_a_stream_the_rest_follows_byte_by_byte(
    answer: tuple[int, list[tuple[int, str]]], kind: type[ChatChunks] | type[TextChunks]
) -> None:
    """Calls, roles and echoes, which were sent before, are neither repeated nor begun again."""
    deltas = answer_of(*answer)
    form = AnswerContext(job_of(answer[0]), StreamOptions(), WITH_TOOLS, ["echo: "])

    def sent(seen: ReaderPosition) -> list[bytes]:
        chunks = kind(form, seen)
        text = b"".join(chunks.render(event) for event in [*deltas, DONE])
        return text.removesuffix(b"\n\n").split(b"\n\n")

    whole = sent(START)
    for at, event in enumerate(whole):
        if event.startswith(b"id: "):
            seen = ReaderPosition.parse(event[4 : event.index(b"\n")].decode(), "x")
            assert sent(seen) == whole[at + 1 :]
            with pytest.raises(StreamDiverged):
                sent(
                    seen._replace(
                        progress=seen.progress._replace(checksum=(seen.progress.checksum or 0) ^ 1)
                    )
                )
    assert len([event for event in whole if event.startswith(b"id: ")]) == len(whole) - 1


@given(ANSWERS, st.sampled_from([ChatChunks, TextChunks]), st.integers(0, 13), st.booleans())
def test_an_id_of_an_event_that_is_no_more_is_refused(
    answer: tuple[int, list[tuple[int, str]]],
    kind: type[ChatChunks] | type[TextChunks],
    at: int,
    is_bare: bool,
) -> None:
    """It ended, or was in the middle of being sent, where a log made again has no border."""
    deltas = answer_of(*answer)
    at = min(at, len(deltas) - 2)
    again = joined(deltas, at)
    form = AnswerContext(job_of(answer[0]), StreamOptions(), WITH_TOOLS, ["echo: "])
    chunks = kind(form)
    for event in deltas:
        for line in chunks.render(event).split(b"\n"):
            if not line.startswith(b"id: "):
                continue
            seen = ReaderPosition.parse(line[4:].decode(), "x")
            seen = seen._replace(progress=Had(seen.progress.position)) if is_bare else seen
            is_lost = event not in again and (seen.num_chunks > 0 or event.position == at)
            if is_lost and not (is_bare and seen.num_chunks and event.position == at):
                with pytest.raises(StreamDiverged):
                    for each in [*again, DONE]:
                        kind(form, seen).render(each)


def test_an_end_before_what_a_caller_had_is_refused() -> None:
    form = AnswerContext(job_of(1), StreamOptions(), WITH_TOOLS)
    end = Done(4, Usage())
    for text in ("5", "5-00000000", "4.1", "4-00000000.1"):
        with pytest.raises(StreamDiverged):
            ChatChunks(form, ReaderPosition.parse(text, "x")).render(end)
    assert ChatChunks(form, ReaderPosition.parse("4", "x")).render(end) == b"data: [DONE]\n\n"


async def nobody_leaves() -> Message:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


class Plain:
    last_id = "7-0000000a"

    def render(self, event: Event) -> bytes:
        return event.dump().encode() + b"\n"

    render_error = render


def relayed(batches: AsyncGenerator[list[Event], None], send: Send) -> None:
    async def left() -> None:
        raise AssertionError("nobody left")

    stream = EventStream(Answering("", batches, Caller(), left), Plain(), ping_s=60)
    asyncio.run(stream({"type": "http"}, nobody_leaves, send))


def test_events_that_wait_are_sent_together() -> None:
    made = [Delta(position=at, token_ids=[at], text="x") for at in range(200)]
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def ready() -> AsyncGenerator[list[Event], None]:
        for at in range(0, 200, 50):
            yield [*made[at : at + 50]]
        yield [DONE]

    relayed(ready(), send)
    assert len(sent) == 1 + 4 + 1 + 1
    body = b"".join(message["body"] for message in sent[1:]).decode()
    assert [json.loads(line)["position"] for line in body.splitlines()] == [*range(200), 15]
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * 5 + [False]


def test_a_job_is_read_no_faster_than_its_caller_reads() -> None:
    num_read, num_sent, ahead = 0, 0, 0

    async def counted() -> AsyncGenerator[list[Event], None]:
        nonlocal num_read, ahead
        for at in range(1000):
            await asyncio.sleep(0)
            num_read += 1
            ahead = max(ahead, num_read - num_sent)
            yield [Delta(position=at, token_ids=[at], text="x")]
        yield [DONE]

    async def send(message: Message) -> None:
        nonlocal num_sent
        for _ in range(5):
            await asyncio.sleep(0)
        num_sent += message.get("body", b"").count(b"\n")

    relayed(counted(), send)
    assert num_sent == 1001
    assert ahead == 1


def test_a_queue_lost_in_mid_stream_is_said_in_the_stream() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def broken() -> AsyncGenerator[list[Event], None]:
        yield [Delta(position=0, token_ids=[1], text="x")]
        raise QueueUnreachable("Redis could not be reached")

    relayed(broken(), send)
    assert sent[0]["status"] == 200
    id_line, last = b"".join(message["body"] for message in sent[1:]).splitlines()[-2:]
    shown = json.loads(last)
    assert (shown["type"], shown["error"]["code"]) == ("failed", "queue_unreachable")
    assert (id_line, shown["position"]) == (b"id: 1", 1)
