"""References to items that were stored, as the AI SDK's default provider sends them."""

import json
import secrets

import httpx
import pytest
import websockets.sync.client

import api_keys
from dialogues import CALL, THINKS, chat_of, marked
from penstock.compose.server import Server
from stage import MODEL, Actor, GatewayProcess, eventually, spoken

Body = dict[str, object]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
USER = {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Bern?"}]}


def post(http: httpx.Client, path: str = "/v1/responses", **body: object) -> dict:
    answer = http.post(path, json={"model": MODEL, "tools": [TOOL], **body})
    assert answer.status_code == 200, answer.text
    made: dict = answer.json()
    return made


def first_turn(http: httpx.Client, actor: Actor, **body: object) -> dict:
    actor.script = lambda job: marked(THINKS, "So</think>", "Well. ", CALL)
    made = post(http, input=[USER], **body)
    assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call"]
    actor.script = lambda job: spoken("It is sunny.")
    return made


def second_input(made: dict) -> list[object]:
    """What the AI SDK sends after the call: its first question, references, and the result."""
    call_id = made["output"][-1]["call_id"]
    refers = [{"type": "item_reference", "id": item["id"]} for item in made["output"]]
    return [USER, *refers, {"type": "function_call_output", "call_id": call_id, "output": "sunny"}]


def whole_input(made: dict) -> list[object]:
    return [USER, *made["output"], second_input(made)[-1]]


def test_a_second_turn_that_refers_to_the_first_reads_as_if_it_had_it(
    files_http: httpx.Client, actor: Actor
) -> None:
    made = first_turn(files_http, actor)
    later = post(files_http, input=second_input(made))
    referred = chat_of(actor).messages
    assert later["output"][0]["content"][0]["text"] == "It is sunny."
    post(files_http, input=whole_input(made))
    assert referred == chat_of(actor).messages
    assert [each["role"] for each in referred] == ["user", "assistant", "tool"]
    bare = [{"id": each["id"]} for each in made["output"]]  # OpenAI's type may be left out
    post(files_http, input=[USER, *bare, second_input(made)[-1]])
    assert referred == chat_of(actor).messages
    listed = files_http.get(f"/v1/responses/{later['id']}/input_items").json()["data"][::-1]
    refers = [{"type": "item_reference", "id": each["id"]} for each in listed]
    post(files_http, input=refers)
    assert referred == chat_of(actor).messages


def test_the_body_of_the_ai_sdks_second_question(files_http: httpx.Client, actor: Actor) -> None:
    """As its version 6 writes it, with its default of `store`."""
    actor.script = lambda job: marked(THINKS, "So</think>It is sunny.")
    told = post(files_http, input=[USER])
    call: Body = {"call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Bern"}'}
    result = '{"temperature":21,"sky":"sunny"}'
    body: Body = {
        "model": MODEL,
        "input": [
            USER,
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "call_1", "output": result},
            {"type": "item_reference", "id": told["output"][1]["id"]},
            {"role": "user", "content": [{"type": "input_text", "text": "And in Rome?"}]},
        ],
        "temperature": 0,
        "max_output_tokens": 60,
        "tools": [TOOL | {"name": "get_weather"}],
        "tool_choice": "auto",
    }
    assert files_http.post("/v1/responses", json=body).status_code == 200
    said = [(each["role"], each["content"]) for each in chat_of(actor).messages]
    assert said[2:] == [
        ("tool", result), ("assistant", "It is sunny."), ("user", "And in Rome?"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "way", ["background", "streamed", "conversation", "previous", "counted", "websocket"]
)
def test_every_way_in_takes_references(files_http: httpx.Client, actor: Actor, way: str) -> None:
    made = first_turn(files_http, actor)
    given: Body = {"model": MODEL, "tools": [TOOL], "input": second_input(made)}
    before = len(actor.jobs)
    if way == "background":
        post(files_http, **given, background=True)
    elif way == "streamed":
        text = files_http.post("/v1/responses", json=given | {"stream": True}).text
        assert "event: response.completed" in text
    elif way == "conversation":
        name = files_http.post("/v1/conversations").json()["id"]
        post(files_http, **given, conversation=name)
        items = files_http.get(f"/v1/conversations/{name}/items").json()["data"]
        assert [item["type"] for item in items][::-1] == [
            "message", "reasoning", "message", "function_call", "function_call_output", "message",
        ]  # fmt: skip
    elif way == "previous":
        post(
            files_http, model=MODEL, input=second_input(made)[1:2], previous_response_id=made["id"]
        )
    elif way == "counted":
        post(files_http, "/v1/responses/input_tokens", **given)
    else:
        url = f"{files_http.base_url}".replace("http", "ws").rstrip("/") + "/v1/responses"
        with websockets.sync.client.connect(url) as socket:
            socket.send(json.dumps({"type": "response.create", **given}))
            kinds = []
            while not kinds or kinds[-1] not in ("response.completed", "error"):
                kinds.append(json.loads(socket.recv(60))["type"])
            assert kinds[-1] == "response.completed"
    eventually(lambda: len(actor.jobs) > before)
    roles = [each["role"] for each in chat_of(actor).messages]
    assert roles[:2] == ["user", "assistant"] and len(roles) == 3


@pytest.mark.parametrize("way", ["created", "added", "asked"])
def test_items_that_were_given_to_a_conversation_are_referred_to(
    files_http: httpx.Client, actor: Actor, way: str
) -> None:
    """When it was made, later, and as the question of a response in it."""
    actor.script = lambda job: spoken("It is sunny.")
    call: Body = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    given = [USER, call, {"type": "function_call_output", "call_id": "1", "output": "sunny"}]
    begun: Body = {"items": given} if way == "created" else {}
    name = files_http.post("/v1/conversations", json=begun).json()["id"]
    if way == "added":
        files_http.post(f"/v1/conversations/{name}/items", json={"items": given}).raise_for_status()
    elif way == "asked":
        post(files_http, input=given, conversation=name)
    listed = files_http.get(f"/v1/conversations/{name}/items", params={"order": "asc"}).json()[
        "data"
    ]
    refers = [{"type": "item_reference", "id": each["id"]} for each in listed[:3]]
    post(files_http, input=[*refers, USER])
    referred = chat_of(actor).messages
    post(files_http, input=[*given, USER])
    assert referred == chat_of(actor).messages
    files_http.delete(f"/v1/conversations/{name}").raise_for_status()
    answer = files_http.post("/v1/responses", json={"model": MODEL, "input": refers})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "item_not_found")


def test_what_is_unknown_not_stored_or_deleted_is_named(
    files_http: httpx.Client, actor: Actor
) -> None:
    apart = first_turn(files_http, actor, store=False)
    gone = first_turn(files_http, actor)
    assert files_http.delete(f"/v1/responses/{gone['id']}").is_success
    kept = first_turn(files_http, actor)
    never = kept["output"][0]["id"].rpartition("_")[0] + "_9"
    unknown = f"msg_job_{kept['id'].split('_')[2]}_{'a' * 26}_0"
    for item_id in (apart["output"][1]["id"], gone["output"][1]["id"], never, unknown, "msg_1"):
        body = {"model": MODEL, "input": [USER, {"type": "item_reference", "id": item_id}]}
        answer = files_http.post("/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("item_not_found", "input[1].id")
        assert item_id in error["message"]


def test_another_tenants_items_are_unknown() -> None:
    with Server() as server, Actor(server.url) as actor:
        ann, bob = (api_keys.issue(actor.redis_url, tenant=each) for each in ("ann", "bob"))
        actor.script = lambda job: spoken(f"secret {secrets.token_hex(4)}")
        with GatewayProcess(actor.redis_url) as gateway, httpx.Client(base_url=gateway.url) as http:
            http.headers["authorization"] = f"Bearer {ann}"
            [item] = post(http, input="hi")["output"]
            name = http.post("/v1/conversations", json={"items": [USER]}).json()["id"]
            [told] = http.get(f"/v1/conversations/{name}/items").json()["data"]
            bodies = [
                {"model": MODEL, "input": [{"type": "item_reference", "id": each["id"]}]}
                for each in (item, told)
            ]
            answers = [http.post("/v1/responses", json=body) for body in bodies]
            assert [each.status_code for each in answers] == [200, 200]
            http.headers["authorization"] = f"Bearer {bob}"
            answers = [http.post("/v1/responses", json=body) for body in bodies]
    assert [each.json()["error"]["code"] for each in answers] == ["item_not_found"] * 2


def test_references_are_bounded(files_http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("x" * 60_000)
    [item] = post(files_http, input="hi")["output"]
    refers = {"type": "item_reference", "id": item["id"]}
    assert files_http.post("/v1/responses", json={"input": [refers] * 3}).status_code == 200
    answer = files_http.post("/v1/responses", json={"input": [refers] * 4})
    assert answer.status_code == 400, answer.text
    assert "the items referred to have more than 200000 bytes" in answer.text
    label = item["id"].split("_")[2]
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    many = [f"msg_job_{label}_{'a' * 24}{one}{two}_0" for one in letters for two in letters]
    body = {"input": [{"type": "item_reference", "id": each} for each in many[:129]]}
    answer = files_http.post("/v1/responses", json=body)
    assert (
        answer.status_code == 400
        and "of 129 responses and conversations, at most 128" in answer.text
    )


def test_a_line_of_a_batch_refers_to_nothing(files_http: httpx.Client, actor: Actor) -> None:
    made = first_turn(files_http, actor)
    body = {"model": MODEL, "input": second_input(made)}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": body}
    sent = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = files_http.post("/v1/files", files=sent, data={"purpose": "batch"}).json()["id"]
    asked = {"endpoint": line["url"], "completion_window": "24h", "input_file_id": file}
    url = f"/v1/batches/{files_http.post('/v1/batches', json=asked).json()['id']}"
    eventually(lambda: files_http.get(url).json()["status"] == "completed")
    refused = files_http.get(
        f"/v1/files/{files_http.get(url).json()['error_file_id']}/content"
    ).json()
    error = refused["response"]["body"]["error"]
    assert error["message"].startswith("input[1]: a line refers to nothing stored")
