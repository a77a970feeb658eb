"""OpenAI's official client understands every response, whole and streamed."""

import time
from typing import get_args

import httpx
import openai
import pytest
from msgspec.structs import replace
from openai import OpenAI
from openai.types.responses import (
    CustomTool,
    FunctionTool,
    FunctionToolParam,
    Response,
    ResponseInputParam,
    ResponseStreamEvent,
)

import api_keys
from dialogues import CALL, SCRIPTS, Person, chat_of, marked
from penstock.compose.server import Server
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Delta, Failed, Timing
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, failed, logprob, spoken

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": False,
}
EVENTS = {  # by their types
    get_args(each.model_fields["type"].annotation)[0]: each
    for each in get_args(get_args(ResponseStreamEvent)[0])
}


def test_a_response(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hello", " you")
    made = client.responses.create(
        model=MODEL,
        input="hi",
        instructions="Be kind.",
        max_output_tokens=20,
        temperature=0.5,
        metadata={"a": "b"},
        extra_body={"top_k": 5},
    )
    assert (made.object, made.status, made.model, made.id[:9]) == (
        "response", "completed", MODEL, "resp_job_",
    )  # fmt: skip
    assert made.output_text == "Hello you" and made.error is None
    [message] = made.output
    assert message.type == "message" and message.status == "completed"
    assert made.usage is not None
    told = made.usage
    assert (told.input_tokens, told.input_tokens_details.cached_tokens) == (5, 3)
    assert (told.output_tokens, told.total_tokens) == (2, 7)
    assert (made.instructions, made.temperature, made.metadata) == ("Be kind.", 0.5, {"a": "b"})
    job = actor.jobs[-1]
    assert (job.params.max_tokens, job.params.top_k, job.metadata) == (20, 5, {"a": "b"})
    assert chat_of(actor).messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


TYPES = {
    "text": ["message"],
    "thinking": ["reasoning", "message"],
    "a call": ["message", "function_call"],
    "calls": ["function_call", "function_call"],
    "all": ["reasoning", "message", "function_call"],
    "nothing": [],
    "cut off": ["function_call"],
}


def bare(made: Response) -> object:
    """The response without what is another for each job."""
    shape = made.model_dump(mode="json", exclude={"id", "created_at", "completed_at"})
    for item in shape["output"]:
        assert item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return shape


def test_a_response_has_the_same_times_whenever_it_is_shown(
    client: OpenAI, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.script = lambda job: [*spoken("a"), 1.2]
    monkeypatch.setattr(actor, "timing", Timing(queue_ms=100, prefill_ms=3000, decode_ms=9000))
    told = list(client.responses.create(model=MODEL, input="hi", stream=True))
    last = told[-1]
    assert last.type == "response.completed"
    made = last.response
    assert made.completed_at == made.created_at + 12
    with client.responses.retrieve(made.id, stream=True) as events:
        assert [each.to_dict() for each in events] == [each.to_dict() for each in told]
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_streamed_response_adds_up_to_the_whole_one(
    client: OpenAI, actor: Actor, name: str
) -> None:
    actor.script = lambda job: SCRIPTS[name]
    tools = [WEATHER] if TYPES[name][-1:] == ["function_call"] else []
    whole = client.responses.create(model=MODEL, input="hi", tools=tools)
    with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
        events = list(stream)
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert bare(last.response) == bare(whole)
        if name != "cut off":
            assert bare(stream.get_final_response()) == bare(whole)
    assert [item.type for item in whole.output] == TYPES[name]
    assert whole.status == ("incomplete" if name == "cut off" else "completed")
    if name == "cut off":
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.output[-1].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SCRIPTS)
def test_events_are_numbered_and_are_what_their_types_say(
    client: OpenAI, actor: Actor, name: str
) -> None:
    """Strictly: each is one of the client's own models, and the deltas are all of the text."""
    actor.script = lambda job: SCRIPTS[name]
    tools = [WEATHER] if TYPES[name][-1:] == ["function_call"] else []
    body = {"model": MODEL, "input": "hi", "stream": True, "tools": tools}
    text = httpx.post(f"{client.base_url}responses", json=body).text
    events = []
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        event = EVENTS[lines["event"]].model_validate_json(lines["data"], strict=True)
        assert event.type == lines["event"]
        events.append(event)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_item.added") == len(TYPES[name])
    assert kinds.count("response.output_item.done") == len(TYPES[name])
    grown: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta
        elif event.type.endswith("text.done"):
            assert grown[event.item_id] == event.text
        elif event.type.endswith("arguments.done"):
            assert grown[event.item_id] == event.arguments


def test_a_call_and_its_result(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    made = client.responses.create(model=MODEL, input="hi", tools=[WEATHER])
    call = made.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"place": "Bern"}')
    later: ResponseInputParam = [
        {"role": "user", "content": "hi"},
        *[item.model_dump(exclude_none=True) for item in made.output],  # type: ignore[list-item]
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    actor.script = lambda job: spoken("Rain.")
    client.responses.create(model=MODEL, input=later, tools=[WEATHER])
    asked, said, told, more = chat_of(actor).messages
    assert asked == {"role": "user", "content": "hi"}
    function = {"name": "weather", "arguments": {"place": "Bern"}}
    assert said == {
        "role": "assistant",
        "content": "Well.",
        "reasoning_content": "So",
        "tool_calls": [{"type": "function", "id": call.call_id, "function": function}],
    }
    assert told == {"role": "tool", "tool_call_id": call.call_id, "content": "rain"}
    assert more == {"role": "user", "content": "And?"}


def test_items_of_several_turns_are_told_apart(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    past: list[dict[str, object]] = [
        {"type": "message", "role": "developer", "content": "d"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "xyz"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"type": "custom_tool_call", "call_id": "3", "name": "h", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
    ]
    client.responses.create(model=MODEL, input=past)  # type: ignore[arg-type]
    shown = [
        (each["role"], each.get("content"), len(each.get("tool_calls", ())))  # type: ignore[arg-type]
        for each in chat_of(actor).messages
    ]
    assert shown == [
        ("system", "d", 0),
        ("assistant", "", 2),
        ("tool", "one", 0),
        ("tool", "two", 0),
        ("assistant", "first", 0),
        ("assistant", "second", 1),
        ("tool", "three", 0),
    ]


def test_a_schema_is_held_and_parsed(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken('{"name": "Ann",', ' "age": 31}')
    made = client.responses.parse(model=MODEL, input="hi", text_format=Person)
    assert made.output_parsed == Person(name="Ann", age=31)
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and isinstance(held.json_schema, dict) and not held.lenient
    assert set(held.json_schema["properties"]) == {"name", "age"}  # type: ignore[arg-type]
    client.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and held.json_object
    form = {"type": "json_object", "schema": {"type": "null"}}
    client.responses.create(model=MODEL, input="hi", text={"format": form})  # type: ignore[typeddict-item]
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and held.json_schema == {"type": "null"} and held.lenient


def test_a_custom_tool_gets_its_text(client: OpenAI, actor: Actor) -> None:
    call = '<tool_call>\n{"name": "run", "arguments": {"input": "ls"}}\n</tool_call>'
    actor.script = lambda job: marked(Markup("hermes"), call[:30], call[30:])
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    tools = [{"type": "custom", "name": "run", "description": "d", "format": grammar}]
    made = client.responses.create(model=MODEL, input="hi", tools=tools)  # type: ignore[call-overload]
    [item] = made.output
    assert item.type == "custom_tool_call" and (item.name, item.input) == ("run", "ls")
    schema = chat_of(actor).tools[0]["function"]
    assert isinstance(schema, dict) and "[a-z]+" in str(schema["parameters"])
    with client.responses.stream(model=MODEL, input="hi", tools=tools) as stream:
        assert bare(stream.get_final_response()) == bare(made)


@pytest.mark.parametrize(
    "choice, wanted, callable_tools",
    [
        ("required", "required", []),
        ({"type": "function", "name": "weather"}, "required", ["weather"]),
        (
            {
                "type": "allowed_tools", "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "auto",
            ["weather"],
        ),
    ],
)  # fmt: skip
def test_the_choice_of_tools(
    client: OpenAI, actor: Actor, choice: object, wanted: str, callable_tools: list[str]
) -> None:
    actor.script = lambda job: marked(Markup("hermes"), CALL)
    made = client.responses.create(  # type: ignore[call-overload]
        model=MODEL, input="hi", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    chat = chat_of(actor)
    assert (chat.tool_choice, chat.callable_tools) == (wanted, callable_tools)
    assert chat.parallel_tool_calls is False and made.parallel_tool_calls is False


def test_effort_verbosity_truncation_and_logprobs(client: OpenAI, actor: Actor) -> None:
    first = replace(spoken("a")[0], logprobs=[logprob("a", -0.5, ("a", -0.5), ("b", -1.0))])
    actor.script = lambda job: [first]
    made = client.responses.create(
        model=MODEL,
        input="hi",
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        truncation="auto",
        top_logprobs=2,
    )
    job = actor.jobs[-1]
    assert chat_of(actor).template_kwargs == {"reasoning_effort": "low", "verbosity": "low"}
    assert (job.params.truncate_prompt_tokens, job.params.logprobs) == (-1, 2)
    part = made.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text" and part.logprobs is not None
    assert [each.token for each in part.logprobs[0].top_logprobs] == ["a", "b"]
    assert made.reasoning is not None and made.reasoning.effort == "low"


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id: 'x' is no item of a"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id: give the item's id"),
        ({"input": [{"id": 5}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: 'resp_1' is not found"),
        ({"background": True, "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"mirostat": 2}, "mirostat"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"logprobs": 2}, "logprobs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"max_output_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens: another"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_is_wrong_or_not_here_is_named(
    client: OpenAI, wrong: dict[str, object], field: str
) -> None:
    body = {"model": MODEL, "input": "hi"} | wrong
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body=body, cast_to=Response)
    assert str(refused.value.body["message"]).startswith(field)  # type: ignore[index]


def test_an_engines_refusal_names_the_field_that_responses_have(
    client: OpenAI, actor: Actor
) -> None:
    told = InvalidJob("max_tokens: 9 prompt tokens and 90 to come are too many", "max_tokens")
    actor.script = lambda job: [Failed(position=0, state="failed", error=told.body())]
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="hi", stream=is_streamed)
        assert refused.value.param == "max_output_tokens"
        assert "max_output_tokens: 9 prompt tokens" in refused.value.message
    made = client.responses.create(model=MODEL, input="hi", background=True)
    eventually(lambda: client.responses.retrieve(made.id).status == "failed")
    shown = client.responses.retrieve(made.id)
    *_, last = client.responses.retrieve(made.id, stream=True)
    assert last.type == "response.failed"
    for each in (shown, last.response):
        assert each.error
        assert each.error.message.startswith("max_output_tokens: 9")


def test_a_failure_in_the_middle_of_a_stream_is_told(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], failed(at=1)]
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert "disk is gone" in last.response.error.message
    assert last.response.output_text == "a"


def test_a_stream_goes_on_after_each_of_its_events(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    body = {"model": MODEL, "input": "hi", "stream": True, "tools": [WEATHER]}
    url, headers = f"{client.base_url}responses", {"idempotency-key": "one"}
    whole = httpx.post(url, json=body, headers=headers).text
    ids = [line[4:] for line in whole.split("\n") if line.startswith("id: ")]
    assert len(ids) == len(set(ids)) > 8
    for last in ids:
        rest = httpx.post(url, json=body, headers=headers | {"last-event-id": last}).text
        there = whole.partition(f"id: {last}\n")[2].partition("\n\n")[2]
        assert rest.count("\nevent: ") == there.count("\nevent: ")
        assert rest.split('"response":')[0] == there.split('"response":')[0]


def test_fields_that_mean_nothing_are_told(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    body = {
        "model": MODEL, "input": "hi", "foo": 1, "store": False, "user": "u",
        "tools": [WEATHER | {"bar": 1}], "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    response = httpx.post(f"{client.base_url}responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-penstock-ignored"] == "foo, tools.0.bar"
    assert response.json()["store"] is False


def test_a_request_as_codex_writes_it(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    text = {"type": "input_text", "text": "Look."}
    body = {
        "model": MODEL,
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [text]},
            {"type": "message", "role": "user", "content": [text]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
            {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "done"},
        ],
        "tools": [
            WEATHER,
            {
                "type": "function", "name": "shell", "description": "Runs it", "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                    "required": ["command"],
                },
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0190",
        "text": {"verbosity": "medium"},
    }  # fmt: skip
    response = httpx.post(f"{client.base_url}responses", json=body)
    assert response.status_code == 200, response.text
    assert "x-penstock-ignored" not in response.headers
    assert "event: response.completed\n" in response.text
    roles = [each["role"] for each in chat_of(actor).messages]
    assert roles == ["system", "system", "user", "assistant", "tool"]


def test_what_only_chats_have_has_its_effect_here_too(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    body = {
        "model": MODEL, "input": "x", "min_p": 0.5,
        "structured_outputs": {"regex": "a+"}, "chat_template_kwargs": {"enable_thinking": False},
        "text": {"verbosity": "low"},
    }  # fmt: skip
    response = httpx.post(f"{client.base_url}responses", json=body)
    assert response.status_code == 200, response.text
    params = actor.jobs[-1].params
    assert params.min_p == 0.5 and params.structured_outputs is not None
    assert params.structured_outputs.regex == "a+"
    assert chat_of(actor).template_kwargs == {"enable_thinking": False, "verbosity": "low"}


def test_an_answer_that_is_not_what_its_schema_says_tells_so(client: OpenAI, actor: Actor) -> None:
    [last] = spoken("[1, 1]")
    actor.script = lambda job: [replace(last, schema_error="not unique")]
    form = {"type": "json_schema", "name": "x", "schema": {"type": "array"}}
    body = {"model": MODEL, "input": "x", "text": {"format": form}}
    made = httpx.post(f"{client.base_url}responses", json=body).json()
    assert made["schema_error"] == "not unique"
    again = client.responses.retrieve(made["id"]).model_extra or {}
    assert again["schema_error"] == "not unique"
    held = actor.jobs[-1].params.structured_outputs
    assert held is not None and (held.lenient, held.asked_as) == (True, "text.format")
    streamed = httpx.post(f"{client.base_url}responses", json=body | {"stream": True}).text
    assert streamed.count('"schema_error":"not unique"') == 1


# Stored responses.


def wait_for(client: OpenAI, response_id: str) -> Response:
    made = client.responses.retrieve(response_id)
    while made.status in ("queued", "in_progress"):
        time.sleep(0.02)
        made = client.responses.retrieve(response_id)
    return made


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_response_is_shown_again(client: OpenAI, actor: Actor, name: str) -> None:
    actor.script = lambda job: SCRIPTS[name]
    tools = [WEATHER] if TYPES[name][-1:] == ["function_call"] else []
    made = client.responses.create(
        model=MODEL, input="hi", tools=tools, instructions="Be kind.", metadata={"a": "b"}
    )
    again = client.responses.retrieve(made.id)
    assert bare(again) == bare(made) and again.id == made.id and made.store  # type: ignore[attr-defined]
    assert [item.id for item in again.output] == [item.id for item in made.output]


def test_one_in_the_background_is_made_although_nobody_waits(client: OpenAI, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [held, *SCRIPTS["all"]]
    made = client.responses.create(model=MODEL, input="hi", background=True, tools=[WEATHER])
    assert (made.status, made.output, made.background) == ("queued", [], True)
    assert client.responses.retrieve(made.id).status in ("queued", "in_progress")
    held.set()
    done = wait_for(client, made.id)
    assert done.status == "completed" and [item.type for item in done.output] == TYPES["all"]
    assert actor.jobs[-1].background


def test_events_of_a_stored_response_follow_from_any_number(client: OpenAI, actor: Actor) -> None:
    """While it is made, and from its result."""
    held = Wait()
    first, *others = SCRIPTS["all"]
    actor.script = lambda job: [first, held, *others]
    made = client.responses.create(
        model=MODEL, input="hi", background=True, tools=[WEATHER], extra_body={"timeout_ms": 60_000}
    )
    live = client.responses.retrieve(made.id, stream=True)
    begun = next(live)
    assert begun.type == "response.created" and begun.sequence_number == 0
    held.set()
    whole = [begun, *live]
    assert [event.sequence_number for event in whole] == [*range(len(whole))]
    assert whole[-1].type == "response.completed"
    for after in range(-1, len(whole) - 1):
        given = {} if after < 0 else {"starting_after": after}
        rest = list(client.responses.retrieve(made.id, stream=True, **given))  # type: ignore[call-overload]
        assert [each.to_dict() for each in rest[:-1]] == [
            each.to_dict() for each in whole[after + 1 : -1]
        ]
        assert rest[-1].sequence_number == len(whole) - 1


def test_a_stream_that_was_cut_goes_on_from_the_store(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    asked = {"model": MODEL, "input": "hi", "tools": [WEATHER]}
    whole = list(client.responses.create(**asked, stream=True, background=True))  # type: ignore[call-overload]
    rest = client.responses.retrieve(whole[0].response.id, stream=True, starting_after=4)
    told = [each.to_dict() for each in rest]
    assert told[:-1] == [each.to_dict() for each in whole[5:-1]]


def test_one_is_cancelled(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], Wait()]
    made = client.responses.create(model=MODEL, input="hi", background=True)
    while client.responses.retrieve(made.id).status == "queued":
        time.sleep(0.02)
    client.responses.cancel(made.id)
    done = wait_for(client, made.id)
    assert (done.status, done.error, done.output_text) == ("cancelled", None, "a")


def test_the_stream_of_one_that_is_cancelled_ends_as_such(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], Wait()]
    with client.responses.create(model=MODEL, input="hi", background=True, stream=True) as events:
        told = iter(events)
        while next(told).type != "response.output_text.delta":
            pass
        job_id = actor.jobs[-1].job_id
        client.responses.cancel(f"resp_{job_id}")
        last = [*told][-1]
    assert last.type == "response.failed"
    shown = client.responses.retrieve(f"resp_{job_id}")
    assert (last.response.status, last.response.error) == ("cancelled", None)
    assert (shown.status, shown.output_text) == ("cancelled", last.response.output_text)


def test_one_that_failed_says_why(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], failed(at=1)]
    made = client.responses.create(model=MODEL, input="hi", background=True)
    done = wait_for(client, made.id)
    assert (done.status, done.output_text) == ("failed", "a")
    assert done.error is not None and "disk is gone" in done.error.message


def test_a_conversation_goes_on(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: SCRIPTS["all"]
    first = client.responses.create(
        model=MODEL, input="hi", tools=[WEATHER], instructions="Be kind."
    )
    call = first.output[-1]
    assert call.type == "function_call"
    actor.script = lambda job: spoken("Rain.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model=MODEL,
        input=[output],  # type: ignore[list-item]
        previous_response_id=first.id,
        instructions="Be short.",
        tools=[WEATHER],
    )
    assert second.previous_response_id == first.id
    third = client.responses.create(model=MODEL, input="Thanks", previous_response_id=second.id)
    function = {"name": "weather", "arguments": {"place": "Bern"}}
    turns = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "So",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    *before, last = chat_of(actor).messages
    assert before == turns and last == {"role": "user", "content": "Thanks"}
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [each.type for each in items] == [
        "message", "reasoning", "message", "function_call", "function_call_output", "message",
        "message",
    ]  # fmt: skip
    newest = client.responses.input_items.list(third.id, limit=2)
    assert [each.id for each in newest.data] == [each.id for each in items[::-1][:2]]
    assert [each.id for each in newest] == [each.id for each in items[::-1]]  # over all pages


def test_a_conversation_has_an_end(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    past: ResponseInputParam = [{"role": "user", "content": "x"}] * 2047
    first = client.responses.create(model=MODEL, input=past)
    with pytest.raises(openai.BadRequestError, match="has 2049 messages, at most 2048"):
        client.responses.create(model=MODEL, input="y", previous_response_id=first.id)


def test_tools_are_told_as_they_are_understood(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    body = {
        "model": MODEL, "input": "x", "tool_choice": "none",
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
    }  # fmt: skip
    made = httpx.post(f"{client.base_url}responses", json=body).json()
    assert Response.model_validate(made, strict=True).tools == [
        FunctionTool(type="function", name="f", parameters={}, strict=False),
        CustomTool(type="custom", name="g"),
    ]


def test_what_is_not_stored_or_deleted_or_anothers_is_not_found(
    client: OpenAI, actor: Actor
) -> None:
    actor.script = lambda job: spoken("a")
    apart = client.responses.create(model=MODEL, input="hi", store=False)
    gone = client.responses.create(model=MODEL, input="hi")
    client.responses.delete(gone.id)
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    for response_id in (apart.id, gone.id, chat.id.replace("chatcmpl-", "resp_")):
        for ask in (
            client.responses.retrieve,
            client.responses.cancel,
            client.responses.delete,
            client.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                ask(response_id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="hi", previous_response_id=response_id)
        assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="is no response's id"):
        client.responses.retrieve("resp_123")


def test_a_kept_job_that_is_no_response_is_not_found(client: OpenAI, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [held]
    body = {"model": MODEL, "prompt": "x"}
    job = httpx.post(f"{client.base_url}jobs", json=body).json()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(f"resp_{job['id']}")
    held.set()


def test_tenants_have_their_own() -> None:
    with Server() as server, Actor(server.url) as actor:
        actor.script = lambda job: spoken("a")
        check_tenants(actor)


def check_tenants(actor: Actor) -> None:
    ann, bob = (api_keys.issue(actor.redis_url, tenant=each) for each in ("ann", "bob"))
    with GatewayProcess(actor.redis_url) as gateway:
        of = {
            key: OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
            for key in (ann, bob)
        }
        made = of[ann].responses.create(model=MODEL, input="hi")
        assert of[ann].responses.retrieve(made.id).output_text == "a"
        for ask in (of[bob].responses.retrieve, of[bob].responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="is not found"):
            of[bob].responses.create(model=MODEL, input="hi", previous_response_id=made.id)


def test_tokens_of_a_prompt_are_counted(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: [
        Delta(position=0, token_ids=[0], prompt_ids=[5, 6, 7], finish_reason="stop")
    ]
    told = client.responses.input_tokens.count(model=MODEL, input="hi", instructions="Be kind.")
    assert told.input_tokens == 3 and len(chat_of(actor).messages) == 2
