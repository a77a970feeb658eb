"""Anthropic's official client understands every message, whole and streamed, and every error."""

import json

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message, MessageParam, ToolParam
from msgspec.structs import replace

from dialogues import CALL, SCRIPTS, THINKS, chat_of, marked
from penstock.schemas.errors import PromptTooLong, QueueFull, WorkerFailed
from penstock.schemas.event import Delta, Failed
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, failed, spoken

HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather at a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def claude(gateway: GatewayProcess) -> Anthropic:
    return Anthropic(base_url=gateway.url, api_key="any", max_retries=0)


def test_a_message(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hello", " you", reason="length")
    answer = claude.messages.create(
        model=MODEL, messages=HI, max_tokens=2, system="Be kind.",
        extra_body={"top_k": 5, "temperature": 0.5},
    )  # fmt: skip
    assert (answer.type, answer.role, answer.model, answer.id[:8]) == (
        "message", "assistant", MODEL, "msg_job_",
    )  # fmt: skip
    [block] = answer.content
    assert block.type == "text" and block.text == "Hello you"
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    told = answer.usage
    assert (told.input_tokens, told.cache_read_input_tokens, told.output_tokens) == (2, 3, 2)
    params = actor.jobs[-1].params
    assert (params.max_tokens, params.top_k, params.temperature) == (2, 5, 0.5)
    assert chat_of(actor).messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]
    assert answer._request_id is not None


def test_what_is_not_said_is_as_the_model_has_it(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    claude.messages.create(model=MODEL, messages=HI, max_tokens=2)
    assert actor.jobs[-1].params.given() == frozenset()


def test_a_stop_sequence_is_told(claude: Anthropic, actor: Actor) -> None:
    first, last = spoken("a", "b")
    actor.script = lambda job: [first, replace(last, stop_reason="END")]
    given = {"model": MODEL, "messages": HI, "max_tokens": 9, "stop_sequences": ["END"]}
    answer = claude.messages.create(**given)  # type: ignore[call-overload]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert actor.jobs[-1].params.stop == ["END"]
    with claude.messages.stream(**given) as stream:
        told = stream.get_final_message()
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "END")


def same(one: Message, other: Message) -> None:
    """The same message but for its job's own names."""

    def bare(message: Message) -> object:
        shape = message.model_dump(mode="json")
        shape.pop("id")
        for block in shape["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
        return shape

    assert bare(one) == bare(other)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_streamed_message_adds_up_to_the_whole_one(
    claude: Anthropic, actor: Actor, name: str
) -> None:
    actor.script = lambda job: SCRIPTS[name]
    asked: dict[str, object] = {"model": MODEL, "messages": HI, "max_tokens": 50}
    if "call" in name or name in ("all", "cut off"):
        asked["tools"] = [WEATHER]
    if name in ("thinking", "all"):
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = claude.messages.create(**asked)  # type: ignore[call-overload]
    with claude.messages.stream(**asked) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        same(stream.get_final_message(), whole)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert kinds.count("content_block_start") == len(whole.content)
    types = [block.type for block in whole.content]
    assert (
        types
        == {
            "text": ["text"],
            "thinking": ["thinking", "text"],
            "a call": ["text", "tool_use"],
            "calls": ["tool_use", "tool_use"],
            "all": ["thinking", "text", "tool_use"],
            "nothing": [],
            "cut off": ["tool_use"],
        }[name]
    )
    ends = {"text": "end_turn", "thinking": "end_turn", "nothing": "end_turn"}
    assert whole.stop_reason == ("max_tokens" if name == "cut off" else ends.get(name, "tool_use"))


def test_a_call_and_its_result(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: marked(Markup("hermes"), CALL)
    first = claude.messages.create(model=MODEL, messages=HI, max_tokens=50, tools=[WEATHER])
    [call] = first.content
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"place": "Bern"})
    assert chat_of(actor).tools[0]["function"] == {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": WEATHER["input_schema"],
    }
    later: list[MessageParam] = [
        *HI,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "rain"},
                {
                    "type": "tool_result", "tool_use_id": "t2", "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}],
                },
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]  # fmt: skip
    actor.script = lambda job: spoken("Rain.")
    claude.messages.create(model=MODEL, messages=later, max_tokens=50, tools=[WEATHER])
    _, said, *told = chat_of(actor).messages
    function = {"name": "weather", "arguments": {"place": "Bern"}}
    assert said["tool_calls"] == [{"id": call.id, "type": "function", "function": function}]
    assert [(each["role"], each["content"]) for each in told] == [
        ("tool", "rain"),
        ("tool", "Error: no\nway"),
        ("user", "And?"),
    ]


def test_what_was_thought_goes_back_to_the_template(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    said: MessageParam = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "So.", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "Well"},
        ],
    }
    claude.messages.create(
        model=MODEL, messages=[*HI, said, {"role": "user", "content": "?"}], max_tokens=2
    )
    assert chat_of(actor).messages[1]["reasoning_content"] == "So."


@pytest.mark.parametrize(
    "edits, kept",
    [
        ([], ["1", "2", "3"]),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], ["1", "2", "3"]),
        ([{"type": "clear_thinking_20251015"}], ["3"]),
        (
            [
                {
                    "type": "clear_thinking_20251015",
                    "keep": {"type": "thinking_turns", "value": 2},
                }
            ],
            ["2", "3"],
        ),
    ],
)
def test_earlier_thinking_is_left_out_as_it_is_asked(
    claude: Anthropic, actor: Actor, edits: list[object], kept: list[str]
) -> None:
    actor.script = lambda job: spoken("a")
    turns: list[dict[str, object]] = []
    for number in range(1, 4):
        thought = {"type": "thinking", "thinking": f"{number}", "signature": ""}
        turns += [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "!"}]},
        ]
    body = {
        "model": MODEL, "max_tokens": 2, "messages": [*turns, *HI],
        "context_management": {"edits": edits},
    }  # fmt: skip
    assert httpx.post(f"{claude.base_url}/v1/messages", json=body).status_code == 200
    told = [each.get("reasoning_content") for each in chat_of(actor).messages]
    assert [each for each in told if each] == kept


@pytest.mark.parametrize(
    "choice, wanted, callable_tools, parallel",
    [
        ({"type": "auto"}, "auto", [], None),
        ({"type": "any"}, "required", [], None),
        ({"type": "tool", "name": "weather"}, "required", ["weather"], None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", [], False),
    ],
)
def test_the_choice_of_tools(
    claude: Anthropic,
    actor: Actor,
    choice: dict[str, object],
    wanted: str,
    callable_tools: list[str],
    parallel: bool | None,
) -> None:
    actor.script = lambda job: marked(Markup("hermes"), CALL)
    claude.messages.create(
        model=MODEL,
        messages=HI,
        max_tokens=50,
        tools=[WEATHER],
        tool_choice=choice,  # type: ignore[arg-type]
    )
    chat = chat_of(actor)
    assert (chat.tool_choice, chat.callable_tools, chat.parallel_tool_calls) == (
        wanted, callable_tools, parallel,
    )  # fmt: skip


def test_none_of_the_tools_is_called_where_none_may_be(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken(CALL)
    answer = claude.messages.create(
        model=MODEL, messages=HI, max_tokens=50, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text" and chat_of(actor).tools == []


def test_thinking_is_asked_for_and_bounded(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: marked(THINKS, "Hm</think>", "\n\nYes")
    budget = {"type": "enabled", "budget_tokens": 1024}
    for thinking, enabled, bound, shown in (
        (budget, True, 1024, ["thinking", "text"]),
        ({"type": "adaptive"}, True, None, ["thinking", "text"]),
        ({"type": "disabled"}, False, None, ["text"]),
        (None, False, None, ["text"]),
    ):
        given = {} if thinking is None else {"thinking": thinking}
        answer = claude.messages.create(model=MODEL, messages=HI, max_tokens=9, **given)  # type: ignore[call-overload]
        chat = chat_of(actor)
        assert chat.template_kwargs == {"enable_thinking": enabled}
        assert chat.thinking_budget == bound
        assert [block.type for block in answer.content] == shown


def test_effort_and_form_of_the_output(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    claude.messages.create(
        model=MODEL, messages=HI, max_tokens=9, extra_body={"output_config": config}
    )
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and isinstance(held.json_schema, dict)
    assert held.json_schema == schema | {"additionalProperties": False} and not held.lenient
    assert chat_of(actor).template_kwargs["reasoning_effort"] == "low"


def test_a_message_that_was_begun_goes_on(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken(" you")
    begun: list[MessageParam] = [*HI, {"role": "assistant", "content": "Hello"}]
    answer = claude.messages.create(model=MODEL, messages=begun, max_tokens=9)
    assert answer.content[0].type == "text" and answer.content[0].text == " you"
    chat = chat_of(actor)
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


def test_what_changes_with_each_request_of_claude_code_is_no_part_of_the_prompt(
    claude: Anthropic, actor: Actor
) -> None:
    actor.script = lambda job: spoken("a")
    claude.messages.create(
        model=MODEL,
        messages=HI,
        max_tokens=9,
        metadata={"user_id": "u" * 100},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12"},
            {"type": "text", "text": "You are a tool.", "cache_control": {"type": "ephemeral"}},
        ],
    )
    assert chat_of(actor).messages[0]["content"] == "You are a tool."
    assert actor.jobs[-1].metadata == {"user_id": "u" * 100}


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "x", "input": {}}]}]},
            "messages: the last one",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "thinking", "thinking": "x"}]}]},
            "messages: thinking",
        ),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop: another field says it"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 1025}, "stop_sequences"),
        ({"tools": [{"name": "x" * 129, "input_schema": {}}]}, "tools[0].name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"system": 3}, "system"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(claude: Anthropic, wrong: dict[str, object], field: str) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 5} | wrong
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.post("/v1/messages", body=body, cast_to=Message)
    told = refused.value.body
    assert isinstance(told, dict) and told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(field), told


def test_names_and_stops_are_as_long_as_anthropics(claude: Anthropic, actor: Actor) -> None:
    tool = {"name": "x" * 128, "input_schema": {"type": "object"}}
    stops = [f"END {number}" for number in range(100)]
    body = {"model": MODEL, "messages": HI, "max_tokens": 5, "tools": [tool]}
    actor.script = lambda job: spoken("fine")
    claude.messages.create(**body, stop_sequences=stops)  # type: ignore[call-overload]
    assert actor.jobs[-1].params.stop == stops
    assert chat_of(actor).tools[0]["function"]["name"] == "x" * 128  # type: ignore[index, call-overload]


def test_every_failure_is_the_clients_own_error(claude: Anthropic, actor: Actor) -> None:
    given = {"model": MODEL, "messages": HI, "max_tokens": 5}
    for failure, kind in (
        (PromptTooLong(9, 5), anthropic.BadRequestError),
        (QueueFull("full"), anthropic.RateLimitError),
        (WorkerFailed("broken"), anthropic.InternalServerError),
    ):
        end = Failed(position=0, state="failed", error=failure.body())
        actor.script = lambda job, end=end: [end]
        with pytest.raises(kind) as refused:
            claude.messages.create(**given)  # type: ignore[call-overload]
        assert refused.value.body["error"]["message"] == failure.message  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(**given | {"model": "none"})  # type: ignore[call-overload]


def test_a_failure_in_the_middle_of_a_stream_is_told(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], failed(at=1)]
    with (
        pytest.raises(anthropic.APIStatusError, match="disk is gone"),
        claude.messages.stream(model=MODEL, messages=HI, max_tokens=5) as stream,
    ):
        stream.get_final_message()


def test_a_stream_goes_on_after_each_of_its_events(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    body = {
        "model": MODEL, "messages": HI, "max_tokens": 50, "stream": True, "tools": [WEATHER],
        "thinking": {"type": "adaptive"},
    }  # fmt: skip
    url, headers = f"{claude.base_url}/v1/messages", {"idempotency-key": "one"}
    whole = httpx.post(url, json=body, headers=headers).text
    ids = [line[4:] for line in whole.split("\n") if line.startswith("id: ")]
    assert len(ids) == len(set(ids)) > 8
    for last in ids:
        rest = httpx.post(url, json=body, headers=headers | {"last-event-id": last}).text
        assert rest == whole.partition(f"id: {last}\n")[2].partition("\n\n")[2]


def test_tokens_are_counted_as_the_prompt_is_written(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: [
        Delta(position=0, token_ids=[0], prompt_ids=[5, 6, 7], finish_reason="stop")
    ]
    told = claude.messages.count_tokens(
        model=MODEL, messages=HI, system="Be kind.", tools=[WEATHER]
    )
    assert told.input_tokens == 3
    job = actor.jobs[-1]
    assert job.text is not None and job.chat is not None
    assert len(job.chat.messages) == 2 and len(job.chat.tools) == 1


def test_fields_that_mean_nothing_are_told(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    body = {
        "model": MODEL, "messages": HI, "max_tokens": 5, "foo": 1, "service_tier": "auto",
        "tools": [WEATHER | {"cache_control": {"type": "ephemeral"}, "bar": 1}],
    }  # fmt: skip
    response = httpx.post(f"{claude.base_url}/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-penstock-ignored"] == "foo, tools.0.bar"


def test_a_key_is_asked_for_in_either_header(actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    with GatewayProcess(actor.redis_url, "--api-key", "right") as gateway:
        given = {"model": MODEL, "messages": HI, "max_tokens": 5}
        for client in (
            Anthropic(base_url=gateway.url, api_key="right", max_retries=0),
            Anthropic(base_url=gateway.url, auth_token="right", max_retries=0),
        ):
            assert client.messages.create(**given).content  # type: ignore[call-overload]
        wrong = Anthropic(base_url=gateway.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            wrong.messages.create(**given)  # type: ignore[call-overload]


def test_events_are_named_and_are_json(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    body = {
        "model": MODEL, "messages": HI, "max_tokens": 50, "stream": True, "tools": [WEATHER],
    }  # fmt: skip
    text = httpx.post(f"{claude.base_url}/v1/messages", json=body).text
    for event in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        assert json.loads(lines["data"])["type"] == lines["event"]


def test_a_request_as_claude_code_writes_it(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    cached = {"cache_control": {"type": "ephemeral"}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL,
        "max_tokens": 500,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                    {"type": "text", "text": "Look.", **cached},
                ],
            }
        ],
        "tools": [{"name": "Bash", "description": "Runs it", "input_schema": schema}, WEATHER],
        "metadata": {"user_id": "user_" + "0" * 90},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    url = f"{claude.base_url}/v1/messages?beta=true"
    response = httpx.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-penstock-ignored" not in response.headers
    assert response.text.rstrip().endswith('{"type":"message_stop"}')
    chat = chat_of(actor)
    assert chat.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert [each["role"] for each in chat.messages] == ["system", "user"]


def test_an_answer_that_is_not_what_its_schema_says_tells_so(
    claude: Anthropic, actor: Actor
) -> None:
    [last] = spoken("[1, 1]")
    actor.script = lambda job: [replace(last, schema_error="not unique")]
    form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    body = {
        "model": MODEL, "messages": HI, "max_tokens": 9, "output_config": {"format": form},
    }  # fmt: skip
    whole = httpx.post(f"{claude.base_url}/v1/messages", json=body).json()
    assert whole["schema_error"] == "not unique"
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and (held.lenient, held.asked_as) == (False, "output_config.format")
    streamed = httpx.post(f"{claude.base_url}/v1/messages", json=body | {"stream": True}).text
    assert streamed.count('"schema_error":"not unique"') == 1


def document(**fields: object) -> dict[str, object]:
    return {"type": "document", "source": {"type": "text", "data": "It rains."}, **fields}


def test_documents_of_text_are_read(claude: Anthropic, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    parts = {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]}
    told = document(title="Weather", context="Of today.", citations={"enabled": False})
    asked = [told, document(source=parts), {"type": "text", "text": "Does it?"}]
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document()]}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    claude.messages.create(model=MODEL, messages=messages, max_tokens=9)  # type: ignore[arg-type]
    said = [each["content"] for each in chat_of(actor).messages]
    assert said == ["Weather\n\nOf today.\n\nIt rains.\na\nb\nDoes it?", "", "It rains."]


@pytest.mark.parametrize(
    "block, where",
    [
        (document(source={"type": "base64", "data": "JVBERi0="}), "content[0].source"),
        (document(source={"type": "url", "url": "http://a"}), "content[0].source"),
        (document(citations={"enabled": True}), "content[0].citations.enabled"),
    ],
)
def test_other_documents_are_refused_by_name(
    claude: Anthropic, block: dict[str, object], where: str
) -> None:
    messages = [{"role": "user", "content": [block]}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=MODEL, messages=messages, max_tokens=9)  # type: ignore[arg-type]
    assert f"messages[0].{where}" in refused.value.message
