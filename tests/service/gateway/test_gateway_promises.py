"""One idempotency key is one job, and a caller who hangs up is noticed: by HTTP and by the SDK."""

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import redis

from api_keys import bearer, issue
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import IdempotencyMismatch, InvalidJob, JobGone
from penstock.schemas.keys import Lane
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
DAY_S = 86_400


def test_fifty_streams_under_one_key_are_one_job_and_equal(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: [0.2, *spoken(*"abcdefgh")]
    num_jobs, headers = len(actor.jobs), {"idempotency-key": "fifty"}

    def ask(number: int) -> str:
        fields = {"stream": True} if number % 2 else {}
        answer = http.post("/v1/chat/completions", json=CHAT | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        if not number % 2:
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    with ThreadPoolExecutor(25) as pool:
        assert set(pool.map(ask, range(50))) == {"abcdefgh"}
    assert len(actor.jobs) == num_jobs + 1


def test_a_repeat_attaches_to_the_stream_that_runs(http: httpx.Client, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken(*"abc")[:2], held, *spoken(*"abc")[2:]]
    num_jobs, headers = len(actor.jobs), {"idempotency-key": "attach"}
    body = TEXT | {"stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        lines = first.iter_lines()
        seen = [next(line for line in lines if line.startswith("data: ")) for _ in range(2)]
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as second:
            held.set()
            again = [line for line in second.iter_lines() if line.startswith("data: ")]
        seen += [line for line in lines if line.startswith("data: ")]

    def texts(events: list[str]) -> str:
        shown = [json.loads(line[6:]) for line in events if line != "data: [DONE]"]
        return "".join(choice["text"] for event in shown for choice in event["choices"])

    assert texts(seen) == texts(again) == "abc"
    assert len(actor.jobs) == num_jobs + 1


@pytest.mark.parametrize("path, body", [("completions", TEXT), ("chat/completions", CHAT)])
def test_another_body_under_a_used_key_is_422_and_not_tried_again(
    http: httpx.Client, actor: Actor, path: str, body: dict[str, object]
) -> None:
    actor.script = lambda job: spoken("once")
    headers = {"idempotency-key": f"used-{path}"}
    assert http.post(f"/v1/{path}", json=body, headers=headers).is_success
    for stream in (False, True):
        other = body | {"max_tokens": 3, "stream": stream}
        refused = http.post(f"/v1/{path}", json=other, headers=headers)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (422, "false")
        assert refused.json()["error"]["code"] == "idempotency_mismatch"


def test_openais_client_does_not_retry_a_mismatch(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("once")
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=5)
    key = {"Idempotency-Key": "openai"}
    made = client.completions.create(model=MODEL, prompt="hi", extra_headers=key)
    same = client.completions.create(model=MODEL, prompt="hi", extra_headers=key)
    assert made.id == same.id
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model=MODEL, prompt="other", extra_headers=key)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "é"])
def test_a_key_that_cannot_be_one_is_refused(http: httpx.Client, key: str) -> None:
    headers = [(b"idempotency-key", key.encode())]
    refused = http.post("/v1/completions", json=TEXT, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


def test_a_key_of_control_characters_is_no_request(http: httpx.Client) -> None:
    headers = [(b"idempotency-key", b"\x01")]
    refused = http.post("/v1/completions", json=TEXT, headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_key_is_the_tenants_own(actor: Actor) -> None:
    actor.script = lambda job: spoken(job.tenant)
    with Server() as server, Actor(server.url, actor.script) as alone:
        keys = [issue(server.url, tenant=tenant) for tenant in ("one", "two")]
        with GatewayProcess(server.url) as gateway:
            for text, tenant in zip(keys, ("one", "two"), strict=True):
                headers = bearer(text) | {"idempotency-key": "x" * 255}
                answer = httpx.post(gateway.url + "/v1/completions", json=TEXT, headers=headers)
                assert answer.json()["choices"][0]["text"] == tenant
        assert len(alone.jobs) == 2


def test_the_sdk_takes_keys_too(actor: Actor) -> None:
    actor.script = lambda job: spoken("once")
    num_jobs = len(actor.jobs)

    async def ask() -> None:
        async with QueueClient.from_url(actor.redis_url) as client:
            jobs = await asyncio.gather(
                *(client.enqueue("hi", idempotency_key="sdk", background=True) for _ in range(50))
            )
            assert len(set(jobs)) == 1
            assert (await client.result(jobs[0])).choices[0].text == "once"  # type: ignore[union-attr]
            with pytest.raises(IdempotencyMismatch):
                await client.enqueue("other", idempotency_key="sdk", background=True)
            with pytest.raises(InvalidJob, match="255"):
                await client.enqueue("hi", idempotency_key="k" * 256)

    asyncio.run(ask())
    assert len(actor.jobs) == num_jobs + 1


def test_a_key_is_remembered_for_a_day_also_when_the_result_is_gone(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("once")
    headers = {"idempotency-key": "day"}
    job_id = http.post("/v1/jobs", json=TEXT, headers=headers).json()["id"]
    eventually(lambda: http.get(f"/v1/jobs/{job_id}").json()["ended_ms"] is not None, 60)
    key, num_jobs = Lane(MODEL).job(job_id), len(actor.jobs)
    with redis.Redis.from_url(actor.redis_url) as client:
        assert DAY_S - 600 < client.ttl(key) <= DAY_S
        client.delete(key + ":result", key + ":log")  # as their own time does it, earlier
    repeat = http.post("/v1/completions", json=TEXT | {"background": True}, headers=headers)
    assert (repeat.status_code, repeat.json()["error"]["code"]) == (410, "job_gone")
    assert repeat.headers["x-should-retry"] == "false"
    other = http.post("/v1/jobs", json=TEXT | {"prompt": "b"}, headers=headers)
    assert other.status_code == 422
    assert len(actor.jobs) == num_jobs

    async def ask() -> None:
        async with QueueClient.from_url(actor.redis_url) as sdk:
            with pytest.raises(JobGone):
                await sdk.result(job_id)

    asyncio.run(ask())


ASK = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
head = "POST /v1/completions HTTP/1.1\\r\\nhost: [::1]\\r\\ncontent-type: application/json\\r\\n"
link.sendall(f"{head}content-length: {len(sys.argv[2])}\\r\\n\\r\\n{sys.argv[2]}".encode())
print("asked", flush=True)
link.recv(1)
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_killed_before_the_first_token_ends_its_job(
    http: httpx.Client, actor: Actor, stream: bool
) -> None:
    """Nobody sweeps here: only the gateway's own look at the connection can end the job."""
    actor.script = lambda job: [Wait(), *spoken("never")]
    num_jobs, body = len(actor.jobs), json.dumps(TEXT | {"stream": stream})
    argv = [sys.executable, "-c", ASK, str(http.base_url.port), body]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as caller:
        eventually(lambda: len(actor.jobs) > num_jobs, 60)
        caller.kill()
    job_id = actor.jobs[-1].job_id
    eventually(lambda: job_id in actor.cancelled, 15)
    eventually(lambda: http.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled", 15)


def test_a_caller_with_a_key_may_hang_up_and_come_back(http: httpx.Client, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [held, *spoken("back")]
    headers, num_jobs = {"idempotency-key": "later"}, len(actor.jobs)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=TEXT, headers=headers, timeout=1)
    held.set()
    answer = http.post("/v1/completions", json=TEXT, headers=headers)
    assert answer.json()["choices"][0]["text"] == "back"
    assert len(actor.jobs) <= num_jobs + 1
