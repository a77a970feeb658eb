"""The whole way on the bundled model, asked by the official client."""

import functools
import json
import operator
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.shared_params.response_format_json_schema import (
    JSONSchema,
    ResponseFormatJSONSchema,
)

from dialogues import Person
from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess

MODEL = "penstock"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with (
        GatewayProcess(server.url) as gateway,
        WorkerProcess(server.url, BUNDLED_MODEL, "--served-model-name", MODEL).ready(),
    ):
        yield OpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0)


def test_a_seeded_chat_streams_what_it_answers_whole(api: OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=HI, max_tokens=40, seed=5)
    with api.chat.completions.stream(
        model=MODEL, messages=HI, max_tokens=40, seed=5, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert whole.choices[0].message.content == streamed.choices[0].message.content
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason
    assert whole.usage is not None and streamed.usage is not None
    assert whole.usage.total_tokens == streamed.usage.total_tokens


def test_how_long_an_answer_took_is_told_where_it_is_asked_for(api: OpenAI) -> None:
    """In all no longer than its caller saw, and of a stream the same fields."""
    asked = {"include_metrics": True}
    began_s = time.monotonic()
    whole = api.chat.completions.create(model=MODEL, messages=HI, max_tokens=40, extra_body=asked)
    took_ms = (time.monotonic() - began_s) * 1000
    told = (whole.model_extra or {})["metrics"]
    parts = [told[f"{part}_ms"] for part in ("queue_time", "time_to_first_token")]
    assert 0 < sum(parts) + told["generation_time_ms"] <= took_ms + 2  # Redis counts whole ones
    assert told["num_attempts"] == 1 and whole.usage is not None
    took_ms = told["time_to_first_token_ms"] + told["generation_time_ms"]
    made = told["tokens_per_second"] * took_ms / 1000
    assert made == pytest.approx(whole.usage.completion_tokens, rel=0.01)
    times = told["mean_itl_ms"] * (whole.usage.completion_tokens - 1)
    assert times == pytest.approx(told["generation_time_ms"], rel=0.01, abs=0.1)
    for options in (openai.omit, ChatCompletionStreamOptionsParam(include_usage=True)):
        *chunks, last = api.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options=options, extra_body=asked
        )
        assert last.choices == [] and set((last.model_extra or {})["metrics"]) == set(told)
        assert (last.usage is None) == (options is openai.omit)
        assert not any("metrics" in (chunk.model_extra or {}) for chunk in chunks)
    two = api.completions.create(model=MODEL, prompt="Hi", n=2, max_tokens=4, extra_body=asked)
    assert "mean_itl_ms" not in (two.model_extra or {})["metrics"]
    plain = api.completions.create(model=MODEL, prompt="Hi", max_tokens=4)
    assert "metrics" not in (plain.model_extra or {})


@pytest.mark.parametrize(
    "path, body",
    [
        ("/responses", {"input": "Hi", "max_output_tokens": 8}),
        ("/messages", {"messages": HI, "max_tokens": 8}),
    ],
)
def test_other_protocols_tell_too_how_long_an_answer_took(
    api: OpenAI, path: str, body: dict[str, object]
) -> None:
    url, asked = f"{api.base_url}".rstrip("/") + path, {"model": MODEL, "include_metrics": True}
    whole = httpx.post(url, json=asked | body).json()
    assert whole["metrics"]["num_attempts"] == 1
    streamed = httpx.post(url, json=asked | body | {"stream": True}).text
    assert streamed.count('"metrics":') == 1
    assert "metrics" not in httpx.post(url, json={"model": MODEL, **body}).json()


def test_beams_are_ranked_by_what_a_token_costs(api: OpenAI) -> None:
    beams = {"use_beam_search": True, "best_of": 5, "ignore_eos": True}
    given = {"model": MODEL, "max_tokens": 30, "temperature": 0}
    prompts = ["one", "two"]
    wide = api.completions.create(**given, prompt=prompts, n=3, logprobs=0, extra_body=beams)  # type: ignore[call-overload]
    assert [choice.index for choice in wide.choices] == [*range(6)]
    totals = [sum(choice.logprobs.token_logprobs) for choice in wide.choices]
    greedy = api.completions.create(
        **given,  # type: ignore[call-overload]
        prompt=prompts,
        logprobs=0,
        extra_body={"ignore_eos": True},
    )
    for place in range(2):
        shown = totals[3 * place : 3 * place + 3]
        assert shown == sorted(shown, reverse=True) and len(set(shown)) == 3
    narrow = beams | {"best_of": 1}
    one = api.completions.create(**given, prompt=prompts, logprobs=0, extra_body=narrow)  # type: ignore[call-overload]
    assert [each.text for each in one.choices] == [each.text for each in greedy.choices]
    assert wide.usage and wide.usage.completion_tokens == 2 * 5 * 30
    chat = api.chat.completions.create(**given, messages=HI, n=2, extra_body=beams | {"best_of": 2})  # type: ignore[call-overload]
    streamed = api.chat.completions.create(  # type: ignore[call-overload]
        **given, messages=HI, n=2, stream=True, extra_body=beams | {"best_of": 2}
    )
    texts = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in chat.choices] and texts[0] != texts[1]


def test_tokens_that_are_named_are_told(api: OpenAI) -> None:
    asked = {
        "logprob_token_ids": [5, 70],
        "allowed_token_ids": [42],
        "return_tokens_as_token_ids": True,
    }
    given = {"model": MODEL, "max_tokens": 2, "extra_body": asked}
    names = {"token_id:5", "token_id:70", "token_id:42"}
    text = api.completions.create(**given, prompt="Hi", logprobs=5)  # type: ignore[call-overload]
    assert [set(each) for each in text.choices[0].logprobs.top_logprobs] == [names] * 2
    assert next(iter(text.choices[0].logprobs.top_logprobs[0])) == "token_id:42"
    chat = api.chat.completions.create(**given, messages=HI, logprobs=True)  # type: ignore[call-overload]
    for told in chat.choices[0].logprobs.content:
        assert {each.token for each in told.top_logprobs} == names


@pytest.mark.parametrize("name", ["grammar", "ebnf", "guided_grammar"])
@pytest.mark.parametrize("grammar", ['root ::= ("ab" | "cd")+', 'start: ("ab" | "cd")+'])
def test_a_grammar_of_either_kind_is_held(api: OpenAI, name: str, grammar: str) -> None:
    answer = api.completions.create(
        model=MODEL, prompt="Hi", max_tokens=20, extra_body={name: grammar}
    )
    text = answer.choices[0].text
    assert text and {text[at : at + 2] for at in range(0, len(text) - 1, 2)} <= {"ab", "cd"}


def test_a_suffix_is_refused_where_the_tokenizer_knows_of_none(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix: this model's tokenizer has no tok"):
        api.completions.create(model=MODEL, prompt="def f(", suffix="return x", max_tokens=5)
    answer = api.completions.create(model=MODEL, prompt="def f(", suffix="", max_tokens=5)
    assert answer.choices[0].text


def test_a_schema_is_kept(api: OpenAI) -> None:
    question: ChatCompletionMessageParam = {
        "role": "user",
        "content": "Anna is 31 years old. Extract name and age.",
    }
    answer = api.chat.completions.parse(
        model=MODEL, messages=[question], response_format=Person, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def schema_format(schema: dict[str, object], strict: bool) -> ResponseFormatJSONSchema:
    named: JSONSchema = {"name": "made", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": named}


def test_a_schema_that_is_not_strict_is_held_in_part_and_the_answer_says_where_it_is_broken(
    api: OpenAI,
) -> None:
    three_of_two: dict[str, object] = {
        "type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3,
        "uniqueItems": True,
    }  # fmt: skip
    question: ChatCompletionMessageParam = {"role": "user", "content": "Count."}
    asked = {"model": MODEL, "messages": [question], "max_tokens": 100}
    for strict in (False, True):  # of items alone it is told even then
        form = schema_format(three_of_two, strict)
        whole = api.chat.completions.create(**asked, response_format=form, n=2)
        for choice in whole.choices:
            assert choice.finish_reason == "stop" and choice.model_extra is not None
            assert "non-unique" in choice.model_extra["schema_error"], choice
        chunks = [*api.chat.completions.create(**asked, response_format=form, stream=True)]
        ends = [chunk.choices[0] for chunk in chunks if chunk.choices]
        told = [each.finish_reason for each in ends if "schema_error" in (each.model_extra or {})]
        assert told == ["stop"]
    never_b: dict[str, object] = {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False, "not": {"required": ["b"]},
    }  # fmt: skip
    made = api.chat.completions.create(**asked, response_format=schema_format(never_b, False))
    assert "schema_error" not in (made.choices[0].model_extra or {})
    assert isinstance(json.loads(made.choices[0].message.content or "")["a"], bool)


def test_a_strict_schema_that_cannot_be_held_is_refused_with_its_place(api: OpenAI) -> None:
    schema: dict[str, object] = {
        "type": "object", "properties": {"a": {"type": "string", "not": {"const": ""}}},
        "required": ["a"],
    }  # fmt: skip
    with pytest.raises(BadRequestError, match=r"response_format: #/properties/a: not:") as refused:
        api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            response_format=schema_format(schema, strict=True),
        )
    assert (refused.value.code, refused.value.param) == ("unsupported_schema", "response_format")


WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": "The name of the city.",
                    "maxLength": 20,
                }
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def about_weather(city: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": f"What is the weather in {city}?"}


def test_a_tool_that_the_model_calls_by_itself_arrives_as_a_call(api: OpenAI) -> None:
    whole = api.chat.completions.create(
        model=MODEL, messages=[about_weather("Paris")], tools=[WEATHER], temperature=0
    ).choices[0]
    with api.chat.completions.stream(
        model=MODEL, messages=[about_weather("Paris")], tools=[WEATHER], temperature=0
    ) as events:
        streamed = events.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        [call] = choice.message.tool_calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            {"city": "Paris"},
        )
        assert not (choice.message.content or "").strip()


@pytest.mark.parametrize("chosen", ["auto", {"name": "get_weather"}], ids=["auto", "forced"])
def test_the_older_form_of_tools_is_answered_in_that_form(api: OpenAI, chosen: object) -> None:
    given = {"model": MODEL, "functions": [WEATHER["function"]], "function_call": chosen}
    said: list[object] = [about_weather("Paris")]
    whole = api.chat.completions.create(**given, messages=said, temperature=0)  # type: ignore[call-overload]
    choice = whole.choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    call = choice.message.function_call
    assert call.name == "get_weather" and json.loads(call.arguments).keys() == {"city"}
    name, arguments, ends = "", "", []
    for chunk in api.chat.completions.create(  # type: ignore[call-overload]
        **given, messages=said, temperature=0, stream=True
    ):
        for piece in chunk.choices:
            assert piece.delta.tool_calls is None
            if piece.delta.function_call:
                name += piece.delta.function_call.name or ""
                arguments += piece.delta.function_call.arguments or ""
            ends += [piece.finish_reason] if piece.finish_reason else []
    assert (name, arguments, ends) == (call.name, call.arguments, ["function_call"])
    said += [
        choice.message.model_dump(exclude_none=True),
        {"role": "function", "name": "get_weather", "content": "18 degrees and sunny"},
    ]
    tools = {"model": MODEL, "tools": [WEATHER], "parallel_tool_calls": False}
    newer = [
        said[0],
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "get_weather", "type": "function", "function": call.model_dump()}
            ],
        },
        {"role": "tool", "tool_call_id": "get_weather", "content": "18 degrees and sunny"},
    ]
    older = api.chat.completions.create(
        **given | {"function_call": "auto"},
        messages=said,
        temperature=0,  # type: ignore[call-overload]
    )
    same = api.chat.completions.create(**tools, messages=newer, temperature=0)  # type: ignore[call-overload]
    assert older.choices[0].message.content == same.choices[0].message.content
    assert older.usage.prompt_tokens == same.usage.prompt_tokens


def test_a_forced_tool_is_called(api: OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL,
        messages=[about_weather("Rome")],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    ) as events:
        streamed = events.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls
    function = streamed.message.tool_calls[0].function
    assert function.name == "get_weather"
    assert set(json.loads(function.arguments)) == {"city"}


def test_log_probabilities_have_the_drawn_token_and_the_likeliest(api: OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content
    for token in answer.logprobs.content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy draws the likeliest
        assert token.bytes is not None and bytes(token.bytes).decode() == token.token
    text = answer.message.content
    assert text and "".join(token.token for token in answer.logprobs.content).startswith(text)


def test_a_prompt_is_scored_in_every_form(api: OpenAI) -> None:
    """As text and as ids, whole and streamed, with and without an answer: the same numbers."""
    text = "Once upon a time, there was a café."
    asked = {"model": MODEL, "echo": True, "logprobs": 2, "temperature": 0}
    one = api.completions.create(prompt=text, max_tokens=1, **asked).choices[0]  # type: ignore[call-overload]
    assert one.text.startswith(text) and one.logprobs is not None
    scores = one.logprobs.token_logprobs
    assert scores[0] is one.logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in scores[1:])
    for value, top in zip(scores[1:], one.logprobs.top_logprobs[1:], strict=True):
        assert 2 <= len(top) <= 3 and value in top.values()
    assert one.logprobs.text_offset[-1] == len(text)

    none = api.completions.create(prompt=text, max_tokens=0, **asked)  # type: ignore[call-overload]
    assert none.choices[0].text == text and none.choices[0].finish_reason == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(none.choices[0].logprobs, name) == getattr(one.logprobs, name)[:-1]

    for max_tokens, whole in ((1, one), (0, none.choices[0])):
        pieces = [
            chunk.choices[0]
            for chunk in api.completions.create(
                prompt=text, max_tokens=max_tokens, stream=True, **asked
            )  # type: ignore[call-overload]
        ]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert pieces[-1].finish_reason == whole.finish_reason
        told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert functools.reduce(
                operator.iadd, [getattr(each, name) for each in told], []
            ) == getattr(whole.logprobs, name)

    known = api.completions.create(
        model=MODEL, prompt=text, max_tokens=0, extra_body={"prompt_logprobs": 0}
    ).choices[0]
    (nothing, *others) = (known.model_extra or {})["prompt_logprobs"]
    ids = [int(token_id) for each in others for token_id in each]
    scores = none.choices[0].logprobs.token_logprobs
    assert nothing is None and len(ids) == len(scores) - 1 and known.text == ""
    told = [value["logprob"] for each in others for value in each.values()]
    assert told == pytest.approx(scores[1:], abs=1e-3)

    # the first token's id is not among them, but any two tokens have the same offset between
    both = api.completions.create(prompt=[ids, ids[:3]], max_tokens=0, **asked)  # type: ignore[call-overload]
    texts = [choice.text for choice in both.choices]
    assert text.endswith(texts[0]) and texts[0].startswith(texts[1])
    assert [len(choice.logprobs.token_logprobs) for choice in both.choices] == [len(ids), 3]


def test_many_answers_are_drawn_and_at_temperature_0_all_the_same(api: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once", "n": 128, "max_tokens": 4}
    same = api.completions.create(temperature=0, **asked)  # type: ignore[call-overload]
    assert len(same.choices) == 128 and len({choice.text for choice in same.choices}) == 1
    others = api.completions.create(seed=1, temperature=2, **asked)  # type: ignore[call-overload]
    assert len(others.choices) == 128 and len({choice.text for choice in others.choices}) > 8


def test_a_prompt_is_cut_and_begun_as_asked(api: OpenAI) -> None:
    def num_tokens(**fields: object) -> int:
        asked = {"model": MODEL, "max_tokens": 1, "extra_body": fields}
        answer = api.completions.create(prompt="Once upon a time " * 40, **asked)  # type: ignore[call-overload]
        assert answer.usage is not None
        return int(answer.usage.prompt_tokens)

    whole = num_tokens()
    assert num_tokens(truncate_prompt_tokens=7) == 7
    assert num_tokens(truncate_prompt_tokens=-1) == whole
    assert num_tokens(add_special_tokens=False) == whole - 1
    longer = api.completions.create(
        model=MODEL,
        prompt="Once " * 9000,
        max_tokens=96,
        extra_body={"truncate_prompt_tokens": -1, "ignore_eos": True},
    )
    assert longer.usage is not None and longer.usage.total_tokens == 4096
    chat = api.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=1, extra_body={"truncate_prompt_tokens": 5}
    )
    assert chat.usage is not None and chat.usage.prompt_tokens == 5


def test_a_chat_tells_the_log_probabilities_of_its_prompt(api: OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=2, n=2, extra_body={"prompt_logprobs": 1}
    )
    scores = (answer.model_extra or {})["prompt_logprobs"]
    assert answer.usage is not None and len(scores) == answer.usage.prompt_tokens
    assert scores[0] is None
    assert all(1 <= len(each) <= 2 for each in scores[1:])
    assert all({"logprob", "rank", "decoded_token"} == set(v) for v in scores[1].values())


def test_prompts_of_every_form_are_answered_as_asked(api: OpenAI) -> None:
    fields = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for prompt, num_choices in (("Once", 1), (["Once", "The"], 2), ([5, 6], 1), ([[5], [6, 7]], 2)):
        answer = api.completions.create(model=MODEL, prompt=prompt, **fields)  # type: ignore[call-overload]
        assert len(answer.choices) == num_choices
        assert answer.usage.completion_tokens == 6 * num_choices
    both = api.completions.create(model=MODEL, prompt="Once", n=2, seed=1, max_tokens=12)
    assert [choice.index for choice in both.choices] == [0, 1]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": "word " * 50_000}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": "word " * 3500, "echo": True, "logprobs": 20}, "prompt_logprobs"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"json": {"type": "odd"}}}, "structured_outputs"),
    ],
)
def test_what_only_the_worker_can_refuse_is_400_also_for_a_stream(
    api: OpenAI, fields: dict[str, object], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            api.post(
                "/completions",
                cast_to=object,
                body={"model": MODEL, "stream": stream, **fields},
            )
        assert raised.value.param == param
