"""Conversations through OpenAI's client: what a response says is there for the next one."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import redis
from openai import OpenAI
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import FunctionToolParam, Response
from pydantic import TypeAdapter

import api_keys
from dialogues import SCRIPTS, chat_of
from penstock.gateway.responses.conversations import MOST_ITEMS
from penstock.schemas.keys import CHORES
from stage import (
    MODEL,
    Actor,
    GatewayProcess,
    HousekeepingProcess,
    Wait,
    eventually,
    failed,
    spoken,
)

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
ITEM: TypeAdapter[ConversationItem] = TypeAdapter(ConversationItem)


def said(client: OpenAI, conversation: Conversation) -> list[str]:
    """The texts of all its items, in their order."""
    found = []
    for item in client.conversations.items.list(conversation.id, order="asc"):
        assert ITEM.validate_python(item.to_dict()).id
        if item.type == "message":
            found.append("".join(getattr(part, "text", "") for part in item.content))
        else:
            found.append(item.type)
    return found


def ask(client: OpenAI, conversation: Conversation, text: str, **more: object) -> Response:
    return client.responses.create(
        model=MODEL,
        input=text,
        conversation=conversation.id,
        **more,  # type: ignore[call-overload]
    )


def test_a_conversation_whose_items_are_gone_is_not_shown_as_empty(
    client: OpenAI, actor: Actor
) -> None:
    item = {"type": "message", "role": "user", "content": "Hello"}
    conversation = client.conversations.create(items=[item])
    empty = client.conversations.create()
    assert said(client, conversation) == ["Hello"] and said(client, empty) == []
    with redis.Redis.from_url(actor.redis_url) as store:
        [key] = store.scan_iter(f"*conversation:{conversation.id}:entries")
        store.delete(key)
    with pytest.raises(openai.NotFoundError):
        said(client, conversation)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.create(conversation.id, items=[item])


def test_each_response_goes_on_with_what_was_said(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hello", " you")
    made = client.conversations.create(
        items=[{"role": "system", "content": "Be kind."}], metadata={"a": "b"}
    )
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    first = client.responses.create(
        model=MODEL, input="hi", conversation={"id": made.id}, instructions="Be short."
    )
    assert first.conversation is not None and first.conversation.id == made.id
    assert first.output_text == "Hello you"
    actor.script = lambda job: SCRIPTS["all"]
    asked = {"model": MODEL, "conversation": made.id, "tools": [WEATHER]}
    with client.responses.stream(input="Rain?", **asked) as stream:  # type: ignore[call-overload]
        last = stream.get_final_response()
    call = last.output[-1]
    assert call.type == "function_call"
    actor.script = lambda job: spoken("Rain.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(model=MODEL, input=[output], conversation=made.id)  # type: ignore[list-item]
    function = {"name": "weather", "arguments": {"place": "Bern"}}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    assert chat_of(actor).messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello you"},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant", "content": "Well.", "reasoning_content": "So", "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]  # fmt: skip
    assert said(client, made) == [
        "Be kind.", "hi", "Hello you", "Rain?", "reasoning", "Well.", "function_call",
        "function_call_output", "Rain.",
    ]  # fmt: skip
    ids = [each.id for each in client.conversations.items.list(made.id, limit=2)]
    assert len({*ids}) == len(ids) == 9  # over all pages, the newest first
    assert ids[::-1][2] == first.output[0].id


def test_items_are_added_shown_and_deleted(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Yes.")
    made = client.conversations.create()
    added = client.conversations.items.create(
        made.id,
        items=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "3"}]},
        ],
    )
    assert [each.type for each in added.data] == ["message"] * 3
    shown = client.conversations.items.retrieve(added.data[1].id, conversation_id=made.id)
    assert shown == added.data[1]
    changed = client.conversations.items.delete(added.data[1].id, conversation_id=made.id)
    assert changed.id == made.id and said(client, made) == ["one", "3"]
    with pytest.raises(openai.NotFoundError, match="item"):
        client.conversations.items.delete(added.data[1].id, conversation_id=made.id)
    ask(client, made, "?")
    assert [each["content"] for each in chat_of(actor).messages] == ["one", "3", "?"]
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
    assert client.conversations.delete(made.id).deleted
    for call in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="conversation"):
            call(made.id)


def test_one_response_at_a_time_is_made_in_it(client: OpenAI, actor: Actor) -> None:
    gate = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], gate, *spoken("a", "b")[1:]]
    made = client.conversations.create()
    background = ask(client, made, "slow", background=True)
    with pytest.raises(openai.ConflictError) as locked:
        ask(client, made, "impatient")
    assert locked.value.code == "conversation_locked"
    with pytest.raises(openai.ConflictError):
        client.conversations.items.create(made.id, items=[{"role": "user", "content": "x"}])
    assert said(client, made) == []
    gate.set()
    eventually(lambda: said(client, made) == ["slow", "ab"])
    actor.script = lambda job: spoken("Now.")
    ask(client, made, "again")
    assert said(client, made) == ["slow", "ab", "again", "Now."]
    client.responses.delete(background.id)
    assert said(client, made)[:2] == ["slow", "ab"]


def test_a_response_that_is_deleted_at_once_was_said_all_the_same(
    client: OpenAI, actor: Actor
) -> None:
    actor.script = lambda job: spoken("a")
    made = client.conversations.create()
    client.responses.delete(ask(client, made, "x").id)
    assert said(client, made) == ["x", "a"]


def test_what_failed_or_was_refused_leaves_nothing(client: OpenAI, actor: Actor) -> None:
    made = client.conversations.create()
    actor.script = lambda job: [*spoken("a", "b")[:1], failed(at=1)]
    with pytest.raises(openai.InternalServerError):
        ask(client, made, "fails")
    actor.script = lambda job: spoken("Yes.")
    key = {"Idempotency-Key": "conversation-0"}
    client.responses.create(model=MODEL, input="x", extra_headers=key)
    with pytest.raises(openai.UnprocessableEntityError):
        ask(client, made, "refused", extra_headers=key)
    ask(client, made, "works")
    assert said(client, made) == ["works", "Yes."]


def test_of_those_who_ask_at_once_one_is_answered(client: OpenAI, actor: Actor) -> None:
    gate = Wait()
    actor.script = lambda job: [gate, *spoken("a")]
    made = client.conversations.create()

    def asked(text: str) -> str:
        try:
            return ask(client, made, text) and text
        except openai.ConflictError:
            return ""

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(asked, str(number)) for number in range(6)]
        eventually(lambda: sum(each.done() for each in asking) == 5)
        gate.set()
    [answered] = filter(None, (each.result() for each in asking))
    assert said(client, made) == [answered, "a"]


def test_it_outlives_the_results_of_its_responses(actor: Actor) -> None:
    """Housekeeping writes down what they said."""
    actor.script = lambda job: spoken("a")
    with (
        GatewayProcess(actor.redis_url, "--responses-kept-s", "4") as gateway,
        HousekeepingProcess(actor.redis_url) as housekeeping,
    ):
        eventually(lambda: "started its chores" in housekeeping.log.read_text())
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
        made = client.conversations.create()
        asked = ask(client, made, "x")

        def is_gone() -> bool:
            try:
                client.responses.retrieve(asked.id)
            except openai.NotFoundError:
                return True
            return False

        eventually(is_gone)
        assert said(client, made) == ["x", "a"]


def test_a_request_that_is_repeated_is_in_it_once(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    made = client.conversations.create()
    again = {"extra_headers": {"Idempotency-Key": "conversation-1"}}
    first = ask(client, made, "x", **again)
    ask(client, made, "y")
    num_jobs = len(actor.jobs)
    assert ask(client, made, "x", **again).id == first.id
    assert len(actor.jobs) == num_jobs
    assert said(client, made) == ["x", "a", "y", "a"]


def test_items_that_are_added_again_under_their_key_are_in_it_once(
    client: OpenAI, actor: Actor
) -> None:
    """Lists name each id once, so it is the model's words that tell."""
    actor.script = lambda job: spoken("a")
    made = client.conversations.create()
    for _ in range(2):
        client.conversations.items.create(
            made.id,
            items=[{"type": "message", "role": "user", "content": "x"}],
            extra_headers={"Idempotency-Key": "items-1"},
        )
    ask(client, made, "y")
    assert [message["content"] for message in chat_of(actor).messages] == ["x", "y"]


def test_one_that_was_never_submitted_locks_it_for_a_minute(client: OpenAI, actor: Actor) -> None:
    """As a gateway leaves it that died between the two."""
    actor.script = lambda job: spoken("a")
    made = client.conversations.create(items=[{"role": "user", "content": "x"}])
    key = f"{CHORES}conversation:{made.id}"
    with redis.Redis.from_url(actor.redis_url) as server:
        seconds, _ = server.time()
        lane = ask(client, client.conversations.create(), "z").id.split("_")[2]
        lost = {"items": [], "job_id": f"job_{lane}_{'a' * 26}", "is_open": True}
        _append(server, key, {**lost, "begun_ms": seconds * 1000})
        with pytest.raises(openai.ConflictError):
            ask(client, made, "y")
        old = {**lost, "begun_ms": seconds * 1000 - 61_000}
        server.lset(f"{key}:entries", -1, json.dumps(old))
        assert said(client, made) == ["x"]
        other = client.responses.create(model=MODEL, input="elsewhere").id
        others = {**lost, "job_id": other.removeprefix("resp_"), "begun_ms": seconds * 1000}
        _append(server, key, others)
        ask(client, made, "y")
        assert said(client, made) == ["x", "y", "a"]
        kept_s = (
            server.ttl(key),
            server.ttl(f"{key}:entries"),
            server.ttl(f"{CHORES}conversations:default"),
        )
    assert all(0 < each <= 30 * 86_400 for each in kept_s)


def _append(server: redis.Redis, key: str, entry: dict[str, object]) -> None:
    server.rpush(f"{key}:entries", json.dumps(entry))
    server.hincrby(key, "length", 1)


def test_it_has_an_end(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    made = client.conversations.create()
    twenty = [{"role": "user", "content": "x"}] * 20
    for _ in range(MOST_ITEMS // 20):
        client.conversations.items.create(made.id, items=twenty)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=f"at most {MOST_ITEMS}"):
        client.conversations.items.create(made.id, items=twenty)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="at most 20"):
        client.conversations.items.create(made.id, items=[*twenty, *twenty])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": f"conv_{'a' * 32}"}, "conversation"),
        ({"conversation": ["x"]}, "conversation: give its id"),
        ({"conversation": f"conv_{'a' * 32}", "previous_response_id": "resp_x"}, "give one of"),
        ({"conversation": f"conv_{'a' * 32}", "store": False}, "store"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, wrong: dict[str, object], field: str) -> None:
    body = {"model": MODEL, "input": "x", **wrong}
    answer = httpx.post(f"{client.base_url}responses", json=body)
    assert answer.status_code in (400, 404) and field in answer.json()["error"]["message"]


def test_a_request_that_was_refused_locks_nothing(actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    few = api_keys.issue(actor.redis_url, limits={"requests_per_minute": 1})
    more = api_keys.issue(actor.redis_url)
    with GatewayProcess(actor.redis_url) as gateway:
        of = [
            OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) for key in (few, more)
        ]
        made = of[0].conversations.create()
        ask(of[0], made, "x")
        with pytest.raises(openai.RateLimitError):
            ask(of[0], made, "y")
        ask(of[1], made, "z")
        assert said(of[1], made) == ["x", "a", "z", "a"]


def test_tenants_have_their_own(actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    keys = [api_keys.issue(actor.redis_url, tenant=name) for name in ("one", "two")]
    with GatewayProcess(actor.redis_url, "--require-api-keys") as gateway:
        mine, other = (
            OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) for key in keys
        )
        made = mine.conversations.create(items=[{"role": "user", "content": "secret"}])
        calls = [
            lambda: other.conversations.retrieve(made.id),
            lambda: other.conversations.delete(made.id),
            lambda: other.conversations.update(made.id, metadata={}),
            lambda: other.conversations.items.list(made.id),
            lambda: other.conversations.items.create(
                made.id, items=[{"role": "user", "content": "x"}]
            ),
            lambda: ask(other, made, "x"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert said(mine, made) == ["secret"]
