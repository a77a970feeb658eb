"""Second turns by every way in: what the first answer gave back is sent again, as it came."""

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis
from openai import OpenAI

from penstock import LLM, SamplingParams
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.redis.script import script_text
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess, HousekeepingProcess, eventually
from worker_process import WorkerProcess

Turn = dict[str, object]
MODEL = "penstock"
LANE = f"penstock:{{{MODEL}:0}}:"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOLD = {"name": "get_weather", "description": "Get the current weather of a city."}
TOOL = {"type": "function", "function": {**TOLD, "parameters": SCHEMA}}
ASKED = {"role": "user", "content": "What is the weather in Bern?"}
WEATHER = '{"temperature": 21, "sky": "sunny"}'
SAID = "It is sunny in Bern, with 21 degrees."
# The templates of real models call methods of content, and write arguments by their names.
STRICT = """{% for each in messages %}{% if each.content is not string %}
{{ raise_exception('content is no string') }}{% endif %}{% for call in each.tool_calls or [] %}
{% if call.function.arguments is not mapping %}{{ raise_exception('arguments are no object') }}
{% endif %}{% endfor %}{% endfor %}"""
USUAL = {"model": MODEL, "temperature": 0, "max_tokens": 60}


@dataclass(frozen=True)
class House:
    redis_url: str
    url: str
    template: Path

    def post(self, path: str, **body: object) -> dict:
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code in (200, 202), answer.text
        made: dict = answer.json()
        return made

    def called(self, **fields: object) -> Turn:
        """The assistant's message with the call, as the first answer of a chat has it."""
        body = {**USUAL, "messages": [ASKED], "tools": [TOOL], **fields}
        message: Turn = self.post("/v1/chat/completions", **body)["choices"][0]["message"]
        assert message["content"] is None and message["tool_calls"]
        return message

    def messages(self) -> list[Turn]:
        called = self.called()
        [call] = called["tool_calls"]  # type: ignore[misc]
        return [ASKED, called, {"role": "tool", "tool_call_id": call["id"], "content": WEATHER}]


@pytest.fixture(scope="module")
def house(server: Server, files: tuple[str, str], tmp_path_factory) -> Iterator[House]:
    template = tmp_path_factory.mktemp("templates") / "strict.jinja"
    bundled = (BUNDLED_MODEL / "chat_template.jinja").read_text()
    template.write_text("".join(STRICT.split("\n")) + bundled)
    flags = ("--served-model-name", MODEL, "--chat-template", str(template))
    with (
        GatewayProcess(server.url, *files) as gateway,
        HousekeepingProcess(server.url, *files),
        WorkerProcess(server.url, BUNDLED_MODEL, *flags).ready(),
    ):
        yield House(server.url, gateway.url, template)


def chat(house: House) -> str:
    body = {**USUAL, "messages": house.messages(), "tools": [TOOL]}
    return str(house.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"])


def streamed_chat(house: House) -> str:
    client = OpenAI(base_url=f"{house.url}/v1", api_key="EMPTY", max_retries=0)
    given = {**USUAL, "tools": [TOOL]}
    with client.chat.completions.stream(messages=[ASKED], **given) as stream:  # type: ignore[arg-type,list-item]
        first = stream.get_final_completion().choices[0].message
    [call] = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    with client.chat.completions.stream(
        messages=[ASKED, first, result],  # type: ignore[arg-type,list-item]
        **given,  # type: ignore[arg-type]
    ) as stream:
        return str(stream.get_final_completion().choices[0].message.content)


def older_chat(house: House) -> str:
    given = {**USUAL, "functions": [TOOL["function"]]}
    first = house.post("/v1/chat/completions", **given, messages=[ASKED])["choices"][0]["message"]
    assert first["content"] is None and first["function_call"]
    result = {"role": "function", "name": "get_weather", "content": WEATHER}
    later = house.post("/v1/chat/completions", **given, messages=[ASKED, first, result])
    return str(later["choices"][0]["message"]["content"])


def responses(house: House, goes_on: str = "items") -> str:
    tool = {"type": "function", **TOLD, "parameters": SCHEMA}
    given = {"model": MODEL, "temperature": 0, "tools": [tool]}
    if goes_on == "conversation":
        given["conversation"] = house.post("/v1/conversations")["id"]
    first = house.post("/v1/responses", **given, input=[ASKED])
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": WEATHER}
    items = [ASKED, call, result] if goes_on == "items" else [result]
    if goes_on == "previous_response_id":
        given["previous_response_id"] = first["id"]
    later = house.post("/v1/responses", **given, input=items)
    return str(later["output"][0]["content"][0]["text"])


def anthropic(house: House) -> str:
    tool = {**TOLD, "input_schema": SCHEMA}
    given = {**USUAL, "tools": [tool]}
    first = house.post("/v1/messages", **given, messages=[ASKED])
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": WEATHER}
    said = [{"role": "assistant", "content": first["content"]}]
    told = [{"role": "user", "content": [result]}]
    later = house.post("/v1/messages", **given, messages=[ASKED, *said, *told])
    return str(later["content"][0]["text"])


def job(house: House) -> str:
    made = house.post("/v1/jobs", **USUAL, messages=house.messages(), tools=[TOOL])
    url = f"{house.url}/v1/jobs/{made['id']}"
    eventually(lambda: httpx.get(url).json()["ended_ms"] is not None)
    return str(httpx.get(url).json()["result"]["choices"][0]["text"])


def sdk(house: House) -> str:
    async def asked() -> str:
        async with QueueClient.from_url(house.redis_url) as client:
            drawn = {"temperature": 0, "max_tokens": 60}
            job_id = await client.enqueue(messages=house.messages(), tools=[TOOL], **drawn)  # type: ignore[arg-type]
            result = await client.result(job_id)
        assert result is not None and result.error is None, result
        return result.choices[0].text

    return asyncio.run(asked())


def plain_redis(house: House) -> str:
    """What docs/protocol.md says, of a service that has nothing of ours but a Lua file."""
    link = redis.Redis.from_url(house.redis_url, decode_responses=True)
    label = base64.b32encode(hashlib.blake2b(MODEL.encode(), digest_size=5).digest())
    unique = base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
    job_id = f"job_{label.decode().lower()[:6]}0_{unique}"
    fields = {
        "chat": {"messages": house.messages(), "tools": [TOOL]},
        "params": {"temperature": 0, "max_tokens": 60},
    }
    text = json.dumps({"job_id": job_id, "model": MODEL, **fields})
    channel, digest = f"{LANE}inbox:plain", hashlib.sha256(text.encode()).hexdigest()
    with link.pubsub() as inbox:
        inbox.subscribe(channel)
        enqueue = link.register_script(script_text("jobs/enqueue")[0])
        assert enqueue(keys=[LANE], args=[job_id, digest, text, channel, "{}"])[0] == "accepted"
        said = ""
        for message in inbox.listen():
            lines = message["data"].split("\n") if message["type"] == "message" else []
            for line in lines:
                event = json.loads(line)["event"]
                assert event["type"] != "failed", event
                said += event.get("text", "")
                if event["type"] == "done":
                    return said
    raise AssertionError("nothing came")


def offline(house: House) -> str:
    small = {"kv_cache_memory_bytes": 20_000_000, "chat_template": str(house.template)}
    params = SamplingParams(temperature=0, max_tokens=60)
    [answer] = LLM(str(BUNDLED_MODEL), **small).chat(house.messages(), params, tools=[TOOL])  # type: ignore[arg-type]
    return answer.outputs[0].text


def batch(house: House) -> str:
    body = {**USUAL, "messages": house.messages(), "tools": [TOOL]}
    asked = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    client = OpenAI(base_url=f"{house.url}/v1", api_key="EMPTY", max_retries=0)
    file = client.files.create(file=("in.jsonl", json.dumps(asked).encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: client.batches.retrieve(made.id).status in ("completed", "failed"))
    told = client.batches.retrieve(made.id)
    assert told.output_file_id is not None, told
    answer = json.loads(client.files.content(told.output_file_id).text)
    return str(answer["response"]["body"]["choices"][0]["message"]["content"])


WAYS: Mapping[str, Callable[[House], str]] = {
    "chat": chat,
    "chat, streamed": streamed_chat,
    "chat, in the older form": older_chat,
    "responses": responses,
    "responses, from the last": lambda house: responses(house, "previous_response_id"),
    "responses, in a conversation": lambda house: responses(house, "conversation"),
    "anthropic": anthropic,
    "jobs": job,
    "sdk": sdk,
    "plain redis": plain_redis,
    "offline": offline,
    "batch": batch,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_first_answer_gave_back_is_taken_again(house: House, way: str) -> None:
    assert WAYS[way](house) == SAID


@pytest.mark.parametrize("way", ["http", "sdk"])
def test_arguments_that_hold_too_much_are_refused_by_name(house: House, way: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f"}}
    call["function"] |= {"arguments": f'{{"a":[{"1," * 2**18}1]}}'}  # type: ignore[operator]
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ASKED]
    if way == "http":
        body = {**USUAL, "messages": messages}
        answer = httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        told = answer.json()["error"]["message"]
    else:

        async def asked() -> str:
            async with QueueClient.from_url(house.redis_url) as client:
                result = await client.result(await client.enqueue(messages=messages))  # type: ignore[arg-type]
            assert result is not None and result.error is not None
            return result.error.message

        told = asyncio.run(asked())
    assert told.startswith("messages[1].tool_calls[0].function.arguments: they hold more than")
