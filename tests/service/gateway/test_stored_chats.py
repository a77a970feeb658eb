"""Chats that are stored, by OpenAI's official client, which refuses shapes that are not its own."""

import asyncio
import json
from functools import partial

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

import api_keys
from dialogues import CALL, marked
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import JobGone, JobNotFound
from penstock.schemas.job import DEFAULT_TENANT
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, failed, spoken

GATEWAY_FLAGS = ("--responses-kept-s", "600")


def client_of(gateway: GatewayProcess, key: str = "EMPTY") -> OpenAI:
    url = f"{gateway.url}/v1"
    return OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


@pytest.fixture
def api(gateway: GatewayProcess, actor: Actor) -> OpenAI:
    actor.script = lambda job: spoken("Hello", " you")
    client = client_of(gateway)
    for each in client.chat.completions.list(limit=100):
        client.chat.completions.delete(each.id)
    return client


def asked(client: OpenAI, text: str = "hi", **more: object) -> ChatCompletion:
    said = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=said, store=True, **more)  # type: ignore[no-any-return, call-overload]


def test_a_stored_chat_is_shown_as_it_was_answered(api: OpenAI) -> None:
    made = asked(api, metadata={"topic": "tea"}, temperature=0.5, seed=7, top_p=0.9)
    (listed,) = api.chat.completions.list()
    shown = api.chat.completions.retrieve(made.id)
    assert listed == shown
    for name, value in made.to_dict().items():
        assert shown.to_dict()[name] == value, name
    more = shown.to_dict()
    assert more["metadata"] == {"topic": "tea"}
    assert (more["temperature"], more["seed"], more["top_p"]) == (0.5, 7, 0.9)


def test_a_streamed_chat_is_stored_too(api: OpenAI) -> None:
    said: list[object] = [{"role": "user", "content": "hi"}]
    with api.chat.completions.stream(model=MODEL, messages=said, store=True) as stream:  # type: ignore[arg-type]
        made = stream.get_final_completion()
    shown = api.chat.completions.retrieve(made.id)
    assert shown.choices[0].message.content == made.choices[0].message.content == "Hello you"
    assert shown.usage and shown.usage.completion_tokens == 2


def test_calls_of_tools_are_shown_as_such(api: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: marked(Markup("hermes"), CALL)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    made = asked(api, tools=[tool])
    assert made.choices[0].message.tool_calls
    assert api.chat.completions.retrieve(made.id).choices == made.choices
    call = made.choices[0].message.tool_calls[0].to_dict()
    parts = [{"type": "text", "text": text} for text in ("And", "?")]
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]  # fmt: skip
    later = api.chat.completions.create(model=MODEL, messages=history, store=True)  # type: ignore[call-overload]
    # OpenAI's reference shows messages of users here; its client's type has the assistant's alone.
    loose = OpenAI(base_url=api.base_url, api_key="EMPTY")
    messages = loose.chat.completions.messages
    shown = list(messages.list(later.id))
    assert [each.to_dict()["role"] for each in shown] == ["system", "user", "assistant", "tool"]
    assert shown[1].content_parts and len(shown[1].content_parts) == 2
    assert shown[2].tool_calls
    told = shown[2].tool_calls[0].to_dict()
    for each in (told, call):  # JSON, with or without spaces
        each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    assert told == call
    ids = [each.id for each in shown]
    assert [each.id for each in messages.list(later.id, order="desc", limit=1)] == ids[::-1]
    rest = messages.list(later.id, after=ids[1]).data
    assert [each.id for each in rest] == ids[2:]


def test_a_list_has_pages_an_order_and_filters(api: OpenAI) -> None:
    made = [asked(api, f"{at}", metadata={"n": f"{at % 2}"}).id for at in range(7)]
    chats = api.chat.completions
    assert [each.id for each in chats.list(limit=3)] == made
    assert [each.id for each in chats.list(limit=3, order="desc")] == made[::-1]
    page = chats.list(limit=3, after=made[1])
    assert [each.id for each in page.data] == made[2:5]
    assert page.has_more
    assert not chats.list(limit=3, after=made[3]).has_more
    assert [each.id for each in chats.list(metadata={"n": "1"})] == made[1::2]
    assert [each.id for each in chats.list(limit=1, metadata={"n": "1"}, model=MODEL)] == made[1::2]
    assert not chats.list(model="other").data
    assert not chats.list(metadata={"m": "1"}).data
    with pytest.raises(openai.BadRequestError, match="after"):
        chats.list(after="chatcmpl-job_none")


def test_metadata_can_be_changed(api: OpenAI) -> None:
    made = asked(api, metadata={"a": "1"})
    changed = api.chat.completions.update(made.id, metadata={"b": "2", "c": "3"})
    assert changed.to_dict()["metadata"] == {"b": "2", "c": "3"}
    assert api.chat.completions.retrieve(made.id) == changed
    assert [each.id for each in api.chat.completions.list(metadata={"b": "2"})] == [made.id]
    with pytest.raises(openai.BadRequestError, match="metadata"):
        api.chat.completions.update(made.id, metadata={f"{at}": "" for at in range(17)})
    with pytest.raises(openai.BadRequestError, match="metadata"):
        api.chat.completions.update(made.id, metadata=None)


def test_what_is_deleted_is_gone(api: OpenAI) -> None:
    made = asked(api)
    gone = api.chat.completions.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "chat.completion.deleted")
    assert not api.chat.completions.list().data
    for act in (api.chat.completions.retrieve, api.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            act(made.id)


def test_what_was_not_stored_or_not_answered_is_not_found(api: OpenAI, actor: Actor) -> None:
    said: list[object] = [{"role": "user", "content": "hi"}]
    plain = api.chat.completions.create(model=MODEL, messages=said)  # type: ignore[call-overload]
    response = api.responses.create(model=MODEL, input="hi")
    wait = Wait()
    actor.script = lambda job: [failed()] if job.metadata else [*spoken("a"), wait, *spoken("b")]
    chats = api.chat.completions
    with pytest.raises(openai.InternalServerError) as failure:
        asked(api, metadata={"f": "1"})
    assert isinstance(failure.value.body, dict)
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(f"chatcmpl-{failure.value.body['job_id']}")
    with chats.create(model=MODEL, messages=said, store=True, stream=True) as stream:  # type: ignore[call-overload]
        first = next(iter(stream))
        with pytest.raises(openai.NotFoundError):  # it is being made
            chats.retrieve(first.id)
        assert not chats.list().data
        wait.set()
        list(stream)
    assert [each.id for each in chats.list()] == [first.id]
    for stored_id in (plain.id, response.id.replace("resp_", "chatcmpl-")):
        with pytest.raises(openai.NotFoundError):
            chats.retrieve(stored_id)
        with pytest.raises(openai.NotFoundError):
            chats.update(stored_id, metadata={})
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id.replace("chatcmpl-", "resp_"))
    for word in ("chatcmpl-1", "batch"):
        for route in (chats.retrieve, chats.delete, partial(chats.update, metadata={})):
            with pytest.raises(openai.NotFoundError, match="no chat completion's id"):
                route(word)
    with pytest.raises(openai.NotFoundError, match="no chat completion's id"):
        api.post("/chat/completions/batch", body={"messages": []}, cast_to=object)


def test_tenants_find_their_own(actor: Actor) -> None:
    with (
        Server() as server,
        Actor(server.url),
        GatewayProcess(server.url, *GATEWAY_FLAGS) as gateway,
    ):
        mine, other = (
            client_of(gateway, api_keys.issue(server.url, tenant=name)) for name in ("a", "b")
        )
        made = asked(mine)
        assert [each.id for each in mine.chat.completions.list()] == [made.id]
        assert not other.chat.completions.list().data
        for act in (
            other.chat.completions.retrieve,
            other.chat.completions.delete,
            other.chat.completions.messages.list,
        ):
            with pytest.raises(openai.NotFoundError):
                act(made.id)
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.update(made.id, metadata={})


async def annotated(url: str, job_id: str, tenant: str) -> None:
    async with QueueClient.from_url(url, tenant) as client:
        await client.annotate(job_id, {"topic": "theirs"})


def test_what_is_told_of_another_tenants_job_changes_nothing(actor: Actor, api: OpenAI) -> None:
    made = asked(api, metadata={"topic": "mine"})
    job_id = made.id.removeprefix("chatcmpl-")
    with pytest.raises(JobNotFound):
        asyncio.run(annotated(actor.redis_url, job_id, "other"))
    shown = api.chat.completions.retrieve(made.id)
    assert shown.to_dict()["metadata"] == {"topic": "mine"}
    plain = api.completions.create(model=MODEL, prompt="hi")
    with pytest.raises(JobGone):
        asyncio.run(annotated(actor.redis_url, plain.id.removeprefix("cmpl-"), DEFAULT_TENANT))


def test_what_is_kept_no_longer_is_not_listed() -> None:
    with (
        Server() as server,
        Actor(server.url),
        GatewayProcess(server.url, "--responses-kept-s", "1") as gateway,
    ):
        client = client_of(gateway)
        made = asked(client)
        eventually(lambda: not client.chat.completions.list().data)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(made.id)
