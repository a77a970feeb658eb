"""The official `openai` client understands every answer, whole and streamed, and every error."""

import json
import time

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from dialogues import Person, chat_of, marked
from penstock.schemas.errors import PromptTooLong
from penstock.schemas.event import Delta, Failed
from penstock.schemas.markup.forms import Markup
from stage import MODEL, Actor, GatewayProcess, Wait, chosen, failed, logprob, spoken

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "$defs": {"place": {"type": "string"}},
        },
    },
}


def test_a_chat(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hello", " you", reason="length")
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=2)
    assert answer.choices[0].message.content == "Hello you"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (7, 3)
    assert (answer.model, answer.id[:9]) == (MODEL, "chatcmpl-")
    assert actor.jobs[-1].params.max_tokens == 2


def test_a_stream_that_is_silent_between_two_tokens_goes_on(actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("He", "llo")[:1], held, *spoken("He", "llo")[1:]]
    with GatewayProcess(actor.redis_url, "--ping-s", "0.05") as gateway:
        client = OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)
        texts = list[str | None]()
        for chunk in client.completions.create(model=MODEL, prompt="x", stream=True):
            texts.append(chunk.choices[0].text)
            if not held.is_set():
                time.sleep(0.3)
                held.set()
    assert texts == ["He", "llo", ""]


def test_a_streamed_chat_adds_up_to_the_whole_one(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("He", "l", "", "lo 🙂", " \u2028", reason="stop")
    with client.chat.completions.stream(
        model=MODEL, messages=HI, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    whole = client.chat.completions.create(model=MODEL, messages=HI)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert streamed.usage == whole.usage


def test_chunks_of_a_streamed_chat(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a", "b")
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "a", "b", None]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_log_probabilities_of_a_chat(client: OpenAI, actor: Actor) -> None:
    token = logprob("é", -0.25, ("é", -0.25), ("a", -1.5))
    actor.script = lambda job: [
        Delta(position=0, token_ids=[0], text="é", logprobs=[token], finish_reason="stop")
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2
    ).choices[0]
    assert actor.jobs[-1].params.logprobs == 2
    assert whole.logprobs is not None and whole.logprobs.content is not None
    (shown,) = whole.logprobs.content
    assert (shown.token, shown.logprob, shown.bytes) == ("é", -0.25, [0xC3, 0xA9])
    assert [(top.token, top.logprob) for top in shown.top_logprobs] == [("é", -0.25), ("a", -1.5)]
    with client.chat.completions.stream(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.logprobs is not None
    assert streamed.logprobs.content == whole.logprobs.content


def test_a_completion_with_everything(client: OpenAI, actor: Actor) -> None:
    token = logprob("x", -0.5, ("y", -0.1))
    actor.script = lambda job: [
        Delta(position=0, token_ids=[0], text="x", logprobs=[token], finish_reason="stop")
    ]
    answer = client.completions.create(
        model=MODEL,
        prompt="hi",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": 10},
        logprobs=1,
        seed=42,
        stop=["END", "\n"],
        user="me",
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [9]},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"y": -0.1, "x": -0.5}
    params = actor.jobs[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.5, 0.9, 42)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, -0.1)
    assert (params.logit_bias, params.logprobs, params.stop) == ({5: 10.0}, 1, ["END", "\n"])
    assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.1, True)
    assert params.stop_token_ids == [9]


def test_two_answers_to_one_question(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: chosen("one", "two")
    whole = client.chat.completions.create(model=MODEL, messages=HI, n=2)
    assert [choice.message.content for choice in whole.choices] == ["one", "two"]
    with client.chat.completions.stream(model=MODEL, messages=HI, n=2) as stream:
        streamed = stream.get_final_completion()
    assert [choice.message.content for choice in streamed.choices] == ["one", "two"]


def test_a_schema_is_asked_for_and_parsed(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken('{"name":', '"Ada","age":36}')
    answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    asked = actor.jobs[-1].params.structured_outputs
    assert asked is not None and isinstance(asked.json_schema, dict)
    assert set(asked.json_schema["properties"]) == {"name", "age"}  # type: ignore[arg-type]
    with client.chat.completions.stream(model=MODEL, messages=HI, response_format=Person) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize(
    "extra, kind, text",
    [
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": "start: x", "x": 1}}, "grammar", "start: x"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json", '{"type": "null"}'),
        ({"guided_json": '{"type":"null"}'}, "json", '{"type":"null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "start: x"}, "grammar", "start: x"),
        ({"regex": "a+", "json_schema": {}}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"', "grammar": ""}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": {"type": "null"}}, "json", '{"type": "null"}'),
        ({"json_schema": '{"type":"null"}', "regex": ""}, "json", '{"type":"null"}'),
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            "json",
            '{"type": "null"}',
        ),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_every_way_to_ask_for_structure(
    client: OpenAI, actor: Actor, extra: dict[str, object], kind: str | None, text: str | None
) -> None:
    actor.script = lambda job: spoken("a")
    client.completions.create(model=MODEL, prompt="hi", extra_body=extra)
    asked = actor.jobs[-1].params.structured_outputs
    assert (asked.constraint if asked else (None, None)) == (kind, text)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'


def test_a_tool_call_among_text(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Let me see.\n", *CALL, "\n", *CALL)
    answer = client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.tool_calls is not None
    calls = [call.function for call in choice.message.tool_calls if call.type == "function"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"place": "Köln"})
    ] * 2
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER]) as stream:
        shown = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert "".join(shown) == "Let me see."
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.arguments for call in calls
    ]
    assert len({call.id for call in streamed.message.tool_calls}) == 2
    chat = actor.jobs[-1].chat
    assert chat is not None and chat.tools == [dict(WEATHER)]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_tool_call_is_forced_by_the_worker(
    client: OpenAI, actor: Actor, choice: object
) -> None:
    texts = '{"name":"weather",', '"arguments":{"place":"Rom"}}'
    actor.script = lambda job: marked(Markup("json"), *texts)
    body = {"tool_choice": choice}
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[WEATHER], extra_body=body
    ).choices[0]
    assert answer.message.tool_calls is not None and not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"place": "Rom"}
    chat = actor.jobs[-1].chat
    assert chat is not None and chat.tool_choice == "required"
    assert chat.callable_tools == ([] if choice == "required" else ["weather"])
    with client.chat.completions.stream(
        model=MODEL, messages=HI, tools=[WEATHER], extra_body=body
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.name == "weather"
    assert streamed.finish_reason == answer.finish_reason == "tool_calls"


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}


def test_the_form_of_a_message_may_stand_beside_a_forced_tool(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: marked(Markup("json"), '{"name":"weather",', '"arguments":{}}')
    given = {"model": MODEL, "messages": HI, "tools": [WEATHER], "tool_choice": "required"}
    for form in (FORM, {"type": "json_object"}):
        client.chat.completions.create(**given, response_format=form)  # type: ignore[call-overload]
        assert chat_of(actor).tool_choice == "required"
        assert actor.jobs[-1].params.structured_outputs is None
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**given, extra_body={"guided_regex": "a"})  # type: ignore[call-overload]
    assert raised.value.param == "response_format"


def test_no_tool_is_offered_where_none_shall_be_called(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken(CALL)
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    chat = actor.jobs[-1].chat
    assert chat is not None and chat.tools == []


THINKS = Markup("hermes", "qwen3")


@pytest.mark.parametrize("shows", [True, False])
def test_thinking_is_apart_from_the_answer(client: OpenAI, actor: Actor, shows: bool) -> None:
    said = marked(THINKS, "<thi", "nk>\nLet me", " see.</think>", "\n\nHi", *CALL)
    actor.script = lambda job: said
    extra = {} if shows else {"include_reasoning": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[WEATHER], extra_body=extra
    )
    message, thought = answer.choices[0].message, "Let me see." if shows else None
    assert message.content == "Hi" and message.tool_calls and len(message.tool_calls) == 1
    assert message.to_dict().get("reasoning") == message.to_dict().get("reasoning_content")
    assert message.to_dict().get("reasoning") == thought
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens is not None
    deltas = [
        chunk.choices[0].delta.to_dict()
        for chunk in client.chat.completions.create(
            model=MODEL, messages=HI, tools=[WEATHER], extra_body=extra, stream=True
        )
    ]
    assert "".join(str(delta.get("reasoning") or "") for delta in deltas) == (thought or "")
    assert "".join(str(delta.get("content") or "") for delta in deltas) == "Hi"


def test_a_custom_tool_gets_a_text(client: OpenAI, actor: Actor) -> None:
    told = '<tool_call>{"name": "run", "arguments": {"input": "1 + \\"x\\""}}</tool_call>'
    actor.script = lambda job: marked(THINKS, *told)
    custom = {"name": "run", "format": {"type": "grammar"}}
    custom["format"]["grammar"] = {"syntax": "regex", "definition": "[0-9].*"}  # type: ignore[index]
    tools = [{"type": "custom", "custom": custom}]
    asked = {"model": MODEL, "messages": HI, "tools": tools}
    answer = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", '1 + "x"')
    chat = chat_of(actor)
    function = chat.tools[0]["function"]
    assert isinstance(function, dict) and function["name"] == "run"
    assert function["parameters"]["properties"] == {  # type: ignore[index, call-overload]
        "input": {"type": "string", "pattern": "^([0-9].*)$"}
    }
    pieces = [
        piece
        for chunk in client.chat.completions.create(stream=True, **asked)  # type: ignore[call-overload]
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    (piece,) = pieces
    assert piece.id != call.id  # it is another job's
    assert piece.to_dict() == {**call.to_dict(), "index": 0, "id": piece.id}
    asked["messages"] = [
        *HI,
        {"role": "assistant", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "5"},
    ]
    client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chat = chat_of(actor)
    past = chat.messages[1]["tool_calls"]
    assert isinstance(past, list) and isinstance(past[0], dict)
    assert past[0]["function"] == {"name": "run", "arguments": {"input": '1 + "x"'}}


def test_of_all_tools_some_are_allowed(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hi")
    other = {"type": "function", "function": {"name": "other"}}
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    asked = {"model": MODEL, "messages": HI, "tools": [WEATHER, other]}
    choice = {"type": "allowed_tools", "allowed_tools": only}
    client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **asked)  # type: ignore[call-overload]
    chat = actor.jobs[-1].chat
    assert chat is not None and len(chat.tools) == 2
    told = (chat.tool_choice, chat.callable_tools, chat.parallel_tool_calls)
    assert told == ("auto", ["other"], False)
    only["tools"] = [{"type": "function", "function": {"name": "nobody"}}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(tool_choice=choice, **asked)  # type: ignore[call-overload]
    assert raised.value.param == "tool_choice"


def test_a_past_call_with_broken_arguments_strands_nobody(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hi")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"pl'}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "error: no JSON"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])  # type: ignore[arg-type]
    chat = chat_of(actor)
    past = chat.messages[1]["tool_calls"]
    assert isinstance(past, list) and isinstance(past[0], dict)
    assert past[0]["function"] == {"name": "weather", "arguments": {"unparsed_arguments": '{"pl'}}


def test_effort_and_documents_are_for_the_template(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("a")
    given = {"documents": [{"text": "x"}], "chat_template_kwargs": {"enable_thinking": True}}
    client.chat.completions.create(
        model=MODEL, messages=HI, reasoning_effort="low", extra_body=given
    )
    chat = actor.jobs[-1].chat
    assert chat is not None and chat.template_kwargs == {
        "reasoning_effort": "low",
        "documents": [{"text": "x"}],
        "enable_thinking": True,
    }
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"chat_template": "own"})
    chat = actor.jobs[-1].chat
    assert chat is not None and (chat.template_kwargs, chat.chat_template) == ({}, "own")
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"chat_template": ""})
    chat = actor.jobs[-1].chat
    assert chat is not None and chat.chat_template is None


def test_the_answer_of_a_tool_goes_back_as_objects(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("Rain.")

    messages: list[ChatCompletionMessageParam] = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"place":"Köln"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    chat = chat_of(actor)
    called = chat.messages[1]["tool_calls"]
    assert isinstance(called, list) and isinstance(called[0], dict)
    assert called[0]["function"] == {"name": "weather", "arguments": {"place": "Köln"}}
    assert chat.messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_models_are_listed_and_found_also_with_a_slash(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL == "acme/tiny"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("acme/none")
    assert raised.value.code == "model_not_found"


def test_every_error_has_its_class(client: OpenAI, actor: Actor) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=HI)
    error = PromptTooLong(5000, 2048).body()
    actor.script = lambda job: [Failed(position=0, state="failed", error=error)]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert raised.value.code == "context_length_exceeded"
    actor.script = lambda job: [failed()]
    with pytest.raises(openai.InternalServerError) as server_error:
        client.chat.completions.create(model=MODEL, messages=HI)
    assert server_error.value.code == "worker_failed"
    actor.script = lambda job: [*spoken("a", "b")[:1], failed(1)]
    with pytest.raises(openai.APIError, match="disk is gone"):
        list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_retries_follow_what_the_error_says(client: OpenAI, actor: Actor) -> None:
    retrying = client.with_options(max_retries=2)
    num_jobs = len(actor.jobs)
    actor.script = lambda job: [failed()] if len(actor.jobs) < num_jobs + 3 else spoken("at last")
    answer = retrying.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "at last"
    assert len(actor.jobs) == num_jobs + 3
    actor.script = lambda job: [0.3, *spoken("late")]
    with pytest.raises(openai.APIStatusError) as raised:
        retrying.chat.completions.create(model=MODEL, messages=HI, extra_body={"timeout_ms": 50})
    assert raised.value.status_code == 504
    assert len(actor.jobs) == num_jobs + 4  # trying again would not help: it was not


def test_an_error_carries_the_job_and_what_was_said_until_then(
    client: OpenAI, actor: Actor
) -> None:
    actor.script = lambda job: [*spoken("Once", " upon", " a time")[:2], Wait()]
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, extra_body={"timeout_ms": 3000}
        )
    assert raised.value.status_code == 504 and isinstance(raised.value.body, dict)
    assert raised.value.body["job_id"] == actor.jobs[-1].job_id
    [choice] = raised.value.body["partial"]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Once upon", None)
    actor.script = lambda job: [*chosen("a", "b"), failed(2)]
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model=MODEL, prompt="x", n=2)
    assert isinstance(raised.value.body, dict)
    partial = Completion.model_validate(raised.value.body["partial"])
    assert partial.id == f"cmpl-{actor.jobs[-1].job_id}"
    assert [each.text for each in partial.choices] == ["a", "b"]
    actor.script = lambda job: [failed()]
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model=MODEL, prompt="x")
    assert isinstance(raised.value.body, dict) and "partial" not in raised.value.body


def test_the_raw_response_carries_the_request_id(client: OpenAI, actor: Actor) -> None:
    actor.script = lambda job: spoken("x")
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices[0].message.content == "x"
    made = client.models.with_raw_response.list().headers["x-request-id"]
    assert made.startswith("req_")
