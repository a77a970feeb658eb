"""A request that names no model asks the one that is served, by every route that takes one."""

import json

import httpx
import pytest

from penstock.compose.server import Server
from stage import MODEL, Actor, GatewayProcess, eventually, failed, spoken

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/jobs": {"messages": HI},
    "/v1/embeddings": {"input": "hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/chat/completions/render": {"messages": HI},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
}


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}], ids=str)
@pytest.mark.parametrize("path", ROUTES)
def test_a_request_without_a_model_asks_the_only_one(
    files_http: httpx.Client, actor: Actor, path: str, given: dict[str, object]
) -> None:
    actor.script = lambda job: [failed()]  # what it would say is another's for each
    before = len(actor.jobs)
    answer = files_http.post(path, json={**ROUTES[path], **given})
    assert answer.status_code in (202, 500), answer.text
    eventually(lambda: len(actor.jobs) == before + 1)
    assert actor.jobs[-1].model == MODEL


def test_in_a_conversation_too(files_http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hi")
    name = files_http.post("/v1/conversations").json()["id"]
    for _ in range(2):
        made = files_http.post("/v1/responses", json={"input": "hi", "conversation": name})
        assert made.status_code == 200 and made.json()["model"] == MODEL, made.text
    assert actor.jobs[-1].chat is not None and len(actor.jobs[-1].chat.messages) == 3


def test_lines_of_a_batch_too(files_http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("Hi")
    line = {"method": "POST", "url": "/v1/chat/completions", "custom_id": "1"}
    text = json.dumps({**line, "body": {"messages": HI}})
    sent = {"file": ("in.jsonl", text.encode())}
    file = files_http.post("/v1/files", files=sent, data={"purpose": "batch"}).json()["id"]
    asked = {"endpoint": line["url"], "completion_window": "24h", "input_file_id": file}
    url = f"/v1/batches/{files_http.post('/v1/batches', json=asked).json()['id']}"
    eventually(lambda: files_http.get(url).json()["status"] in ("completed", "failed"))
    made = files_http.get(url).json()
    answer = json.loads(files_http.get(f"/v1/files/{made['output_file_id']}/content").text)
    assert answer["response"]["body"]["model"] == MODEL


def test_of_several_models_one_is_to_be_named() -> None:
    with (
        Server() as server,
        Actor(server.url),
        Actor(server.url, model="another"),
        GatewayProcess(server.url) as gateway,
    ):
        for path, body in ROUTES.items():
            answer = httpx.post(f"{gateway.url}{path}", json=body)
            assert answer.status_code == 400, answer.text
            told = answer.json()["error"]["message"]
            assert told == f"model: give one; served: {MODEL}, another", path


def test_where_none_is_served_that_is_told(redis_url: str) -> None:
    with GatewayProcess(redis_url) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "hi"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == "model: give one; served: none at present"
