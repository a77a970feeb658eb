"""Scenarios of agents' frameworks, against the bundled model at a URL.

The tool answers in JSON, as those did of which the model learned.
"""

import os
from collections import Counter

import litellm
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    Runner,
    function_tool,
)
from agents import set_tracing_disabled as disable_tracing
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel

MODEL = "penstock-5m"
URL = os.environ["TEST_API_BASE_URL"]
ASKED = "What is the weather in Bern?"
ANSWER = "It is sunny in Bern, with 21 degrees."
PERSON = "Anna is 31 years old. Extract name and age."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return '{"temperature": 21, "sky": "sunny"}'


@pytest.fixture
def agent():
    disable_tracing(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    return Agent(
        name="weather",
        tools=[get_weather],
        model=OpenAIResponsesModel(MODEL, client),
        model_settings=ModelSettings(temperature=0, max_tokens=60),
    )


async def test_an_agent_calls_its_tool_and_goes_on_with_its_conversation(agent):
    ran = await Runner.run(agent, ASKED, max_turns=4)
    assert ran.final_output == ANSWER
    kinds = [type(each).__name__ for each in ran.new_items]
    assert kinds == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    later = await Runner.run(
        agent, "And in Basel?", previous_response_id=ran.last_response_id, max_turns=4
    )
    assert later.final_output == ANSWER.replace("Bern", "Basel")


async def test_an_agent_is_streamed(agent):
    ran = Runner.run_streamed(agent, ASKED, max_turns=4)
    kinds = Counter()
    async for event in ran.stream_events():
        kinds[getattr(getattr(event, "data", None), "type", event.type)] += 1
    assert ran.final_output == ANSWER
    assert kinds["response.completed"] == 2 and kinds["response.output_text.delta"] > 2


async def test_an_agent_speaks_over_a_websocket():
    disable_tracing(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    agent = Agent(
        name="weather",
        tools=[get_weather],
        model=OpenAIResponsesWSModel(MODEL, client),
        model_settings=ModelSettings(temperature=0, max_tokens=60, store=False),
    )
    ran = Runner.run_streamed(agent, ASKED, max_turns=4)
    kinds = Counter([event.type async for event in ran.stream_events()])
    assert ran.final_output == ANSWER and kinds["raw_response_event"] > 8


async def test_an_agents_output_has_a_type():
    disable_tracing(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    reader = Agent(
        name="reader",
        model=OpenAIResponsesModel(MODEL, client),
        output_type=Person,
        model_settings=ModelSettings(temperature=0, max_tokens=60),
    )
    ran = await Runner.run(reader, PERSON)
    assert ran.final_output == Person(name="Anna", age=31)


def test_langchain_asks_for_responses():
    model = ChatOpenAI(
        model=MODEL, base_url=URL, api_key="none", use_responses_api=True, temperature=0,
        max_tokens=60,
    )  # fmt: skip
    whole = model.invoke("Hello! Who are you?").text
    assert whole == "".join(chunk.text for chunk in model.stream("Hello! Who are you?"))
    typed = model.with_structured_output(Person, method="json_schema")
    assert typed.invoke(PERSON) == Person(name="Anna", age=31)
    tool = {"name": "get_weather", "description": "", "parameters": SCHEMA}
    called = model.bind_tools([tool], tool_choice="get_weather").invoke(ASKED)
    assert [call["args"] for call in called.tool_calls] == [{"city": "Bern"}]


def test_langchain_asks_for_anthropics_messages():
    model = ChatAnthropic(
        model=MODEL, base_url=URL.removesuffix("/v1"), api_key="none", max_tokens=60
    )
    whole = model.invoke("Hello! Who are you?")
    assert whole.text and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream("Hello! Who are you?"))
    tool = {"name": "get_weather", "description": "", "input_schema": SCHEMA}
    called = model.bind_tools([tool], tool_choice="get_weather").invoke(ASKED)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]


def test_litellm_asks_in_each_of_its_forms():
    hi = [{"role": "user", "content": "Hello! Who are you?"}]
    of = {"api_base": URL, "api_key": "none"}
    chat = litellm.completion(f"openai/{MODEL}", messages=hi, max_tokens=40, temperature=0, **of)
    text = chat.choices[0].message.content
    chunks = litellm.completion(
        f"openai/{MODEL}", messages=hi, max_tokens=40, temperature=0, stream=True, **of
    )
    assert text == "".join(each.choices[0].delta.content or "" for each in chunks)
    response = litellm.responses(
        model=f"openai/{MODEL}", input=hi[0]["content"], max_output_tokens=40, temperature=0, **of
    )
    assert response.output[0].content[0].text == text
    of["api_base"] = URL.removesuffix("/v1")
    message = litellm.completion(f"anthropic/{MODEL}", messages=hi, max_tokens=40, **of)
    assert message.choices[0].message.content
