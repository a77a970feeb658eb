"""The jobs API: put in, looked at, followed from anywhere, cancelled, erased."""

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dialogues import plain_chat
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import Delta
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}
PIECES = ("a", "é", "", "日本", "\n\n", '"', " the", "🙂", "\u2028", "data: ")


@pytest.fixture(scope="module")
def gateways(actor: Actor, gateway: GatewayProcess) -> Iterator[list[GatewayProcess]]:
    with GatewayProcess(actor.redis_url) as other:
        yield [gateway, other]


def submitted(http: httpx.Client, **fields: object) -> str:
    response = http.post("/v1/jobs", json=TEXT | fields)
    assert response.status_code == 202, response.text
    job_id: str = response.json()["id"]
    return job_id


def ended(http: httpx.Client, job_id: str) -> dict[str, object]:
    eventually(lambda: http.get(f"/v1/jobs/{job_id}").json()["ended_ms"] is not None)
    shown: dict[str, object] = http.get(f"/v1/jobs/{job_id}").json()
    return shown


def test_a_job_is_accepted_looked_at_and_answered(http: httpx.Client, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], held, *spoken("a", "b")[1:]]
    fields = {"params": {"temperature": 0.5, "seed": 7, "logprobs": 2, "stop": None}}
    job_id = submitted(http, **fields, metadata={"k": "v"}, timeout_ms=60_000)
    eventually(lambda: http.get(f"/v1/jobs/{job_id}").json()["num_tokens"] == 1)
    running = http.get(f"/v1/jobs/{job_id}").json()
    assert (running["object"], running["state"]) == ("job", "decoding")
    assert running["usage"] == {"completion_tokens": 1}
    assert "result" not in running
    held.set()
    done = ended(http, job_id)
    assert done["state"] == "succeeded"
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3}
    assert done["usage"] == counts | {"reasoning_tokens": 0}
    result = done["result"]
    assert isinstance(result, dict) and result["choices"][0]["text"] == "ab"
    job = actor.jobs[-1]
    assert (job.background, job.metadata, job.timeout_ms) == (True, {"k": "v"}, 60_000)
    assert (job.params.temperature, job.params.seed, job.params.logprobs) == (0.5, 7, 2)


@pytest.mark.parametrize("name", ["guided_regex", "regex"])
def test_a_structure_may_stand_among_the_params(
    http: httpx.Client, actor: Actor, name: str
) -> None:
    actor.script = lambda job: spoken("a")
    ended(http, submitted(http, params={name: "a+"}))
    structure = actor.jobs[-1].params.structured_outputs
    assert structure is not None and structure.constraint == ("regex", "a+")


def test_a_job_may_be_a_chat(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("yes")
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]
    chat = {"model": MODEL, "messages": messages, "params": {"logprobs": 3}}
    response = http.post("/v1/jobs", json=chat | {"background": False})
    assert response.status_code == 202
    ended(http, response.json()["id"])
    job = actor.jobs[-1]
    assert not job.background
    assert plain_chat(job).messages == [{"role": "system", "content": "Be brief."}]
    assert (job.params.logprobs, job.params.max_tokens) == (3, None)


def events_in(received: bytes) -> list[bytes]:
    """The whole events of a response's first bytes, chunked transfer undone."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.split(b"\n\n")[:-1]


def read_at_most(gateway: GatewayProcess, job_id: str, cursor: str, limit: int) -> list[bytes]:
    """The events that arrive before the connection is cut after `limit` bytes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as connection:
        head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(f"{head}last-event-id: {cursor}\r\n\r\n".encode())
        received = b""
        while len(received) < limit and (piece := connection.recv(limit - len(received))):
            received += piece
    assert received.startswith(b"HTTP/1.1 200") or len(received) < 12
    return events_in(received)


def id_of(event: bytes) -> str:
    return event.split(b"\n")[0].removeprefix(b"id: ").decode()


def test_a_stream_cut_at_200_places_and_resumed_elsewhere_is_byte_equal(
    http: httpx.Client, actor: Actor, gateways: list[GatewayProcess]
) -> None:
    dice = random.Random(5)
    num_cuts = 0
    while num_cuts < 200:
        made = [dice.choice(PIECES) for _ in range(60)]
        pace = dice.choice([0.0, 0.004])
        actor.script = lambda job, made=made, pace=pace: [  # type: ignore[misc]
            line for delta in spoken(*made) for line in (delta, pace)
        ]
        job_id = submitted(http)
        shown: list[bytes] = []
        while not shown or b'"type":"done"' not in shown[-1]:
            cursor = id_of(shown[-1]) if shown else "0"
            limit = dice.randrange(1, 900)
            shown += read_at_most(gateways[num_cuts % 2], job_id, cursor, limit)
            num_cuts += 1
            assert num_cuts < 1000, "the resumed streams do not advance"
        uncut = httpx.get(f"{gateways[0].url}/v1/jobs/{job_id}/events").content
        assert b"".join(event + b"\n\n" for event in shown) == uncut
        assert uncut.isascii()  # no reader of SSE finds a line end in the text
        texts = [json.loads(event.split(b"\ndata: ")[1]).get("text", "") for event in shown]
        assert "".join(texts) == "".join(made)


def test_last_event_id_counts_for_more_than_the_query(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken(*"abcdef")
    job_id = submitted(http)
    ended(http, job_id)
    path = f"/v1/jobs/{job_id}/events?starting_after=1"
    assert http.get(path).text.startswith("id: 2\n")
    assert http.get(path, headers={"last-event-id": "4"}).text.startswith("id: 5\n")


def test_many_readers_who_join_at_random_read_the_same(
    http: httpx.Client, actor: Actor, gateways: list[GatewayProcess]
) -> None:
    actor.script = lambda job: [
        line for delta in spoken(*"abcdefgh" * 5) for line in (delta, 0.005)
    ]
    job_id = submitted(http)
    urls = [f"{gateways[number % 2].url}/v1/jobs/{job_id}/events" for number in range(20)]
    with ThreadPoolExecutor(10) as pool:
        texts = set(pool.map(lambda url: httpx.get(url, timeout=120).text, urls))
    assert len(texts) == 1
    assert texts.pop().count('"type":"delta"') == 40


def test_an_unended_job_of_a_follower_who_left_goes_on(
    http: httpx.Client, actor: Actor, gateways: list[GatewayProcess]
) -> None:
    held = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], held, *spoken("a", "b")[1:]]
    job_id = submitted(http)
    url = f"{gateways[0].url}/v1/jobs/{job_id}/events"
    with httpx.stream("GET", url) as response:
        assert next(response.iter_lines()) == "id: 1"
    held.set()
    assert ended(http, job_id)["state"] == "succeeded"


def test_cancel_ends_a_running_job_and_is_idempotent(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: [*spoken("a", "b")[:1], Wait(), *spoken("a", "b")[1:]]
    job_id = submitted(http)
    eventually(lambda: http.get(f"/v1/jobs/{job_id}").json()["num_tokens"] == 1)
    assert http.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
    done = ended(http, job_id)
    assert done["state"] == "cancelled"
    result = done["result"]
    assert isinstance(result, dict) and result["choices"][0]["text"] == "a"
    assert http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    assert '"state":"cancelled"' in http.get(f"/v1/jobs/{job_id}/events").text


def test_a_deleted_job_is_gone_and_leaves_nothing(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("erase", " me")
    job_id = submitted(http, prompt="a canary in the prompt")
    ended(http, job_id)
    response = http.delete(f"/v1/jobs/{job_id}")
    assert response.json() == {"id": job_id, "object": "job", "deleted": True}
    for path in ("", "/events"):
        assert http.get(f"/v1/jobs/{job_id}{path}").status_code in (404, 410)
    assert http.delete(f"/v1/jobs/{job_id}").status_code in (404, 410)


def test_a_job_out_of_time_is_504_for_who_waits_and_expired_for_who_looks(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: [Wait(), *spoken("late")]
    response = http.post("/v1/completions", json=TEXT | {"timeout_ms": 100})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert ended(http, submitted(http, timeout_ms=100))["state"] == "expired"


def test_fifty_submissions_under_one_key_are_one_job(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: [0.1, *spoken("once", " only")]
    num_jobs = len(actor.jobs)
    headers = {"idempotency-key": "k-50"}
    with ThreadPoolExecutor(25) as pool:
        posts = [
            pool.submit(lambda: http.post("/v1/completions", json=TEXT, headers=headers))
            for _ in range(50)
        ]
        answers = [post.result().json() for post in posts]
    assert {answer["choices"][0]["text"] for answer in answers} == {"once only"}
    assert len({answer["id"] for answer in answers}) == 1
    assert len(actor.jobs) == num_jobs + 1


def test_another_body_under_a_used_key_is_refused(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("first")
    headers = {"idempotency-key": "k-used", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    assert http.post("/v1/jobs", json=TEXT, headers=headers).status_code == 202
    other_trace = headers | {"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"}
    assert http.post("/v1/jobs", json=TEXT, headers=other_trace).status_code == 202
    response = http.post("/v1/jobs", json=TEXT | {"prompt": "other"}, headers=headers)
    assert (response.status_code, response.headers["x-should-retry"]) == (422, "false")
    assert response.json()["error"]["code"] == "idempotency_mismatch"


def test_a_foreign_job_is_not_found(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("secret")

    async def other_tenant() -> str:
        async with QueueClient.from_url(actor.redis_url, tenant="other") as client:
            job_id = await client.enqueue("hi", model=MODEL, background=True)
            result = await client.result(job_id)
            assert result is not None and result.choices[0].text == "secret"
            return job_id

    job_id = asyncio.run(other_tenant())
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        response = http.request(method, f"/v1/jobs/{job_id}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "job_not_found")


@pytest.mark.parametrize(
    "fields, priority_class",
    [
        ({}, "normal"),
        ({"priority": -1}, "normal"),
        ({"priority": 3}, "normal"),
        ({"priority_class": "batch"}, "batch"),
        ({"priority_class": "high", "service_tier": "flex"}, "high"),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "priority"}, "high"),
    ],
)
def test_priority_is_carried(
    http: httpx.Client, actor: Actor, fields: dict[str, object], priority_class: str
) -> None:
    actor.script = lambda job: spoken("x")
    ended(http, submitted(http, **fields))
    job = actor.jobs[-1]
    assert (job.priority_class, job.priority) == (priority_class, fields.get("priority", 0))


@pytest.mark.parametrize("path", ["completions", "chat/completions", "jobs"])
def test_a_trace_is_carried_and_a_broken_one_is_not(
    http: httpx.Client, actor: Actor, path: str
) -> None:
    actor.script = lambda job: spoken("x")
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    for sent, carried in ((trace, trace), ("00-nonsense", None), (trace + "0", None)):
        num_jobs, asked = len(actor.jobs), chat if path.startswith("chat") else TEXT
        assert http.post(f"/v1/{path}", json=asked, headers={"traceparent": sent}).is_success
        eventually(lambda: len(actor.jobs) > num_jobs)  # noqa: B023
        assert actor.jobs[-1].traceparent == carried


def test_positions_in_the_events_are_what_their_ids_follow_from(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: [
        Delta(position=0, index=1, token_ids=[1, 2, 3], text="b"),
        Delta(position=3, index=0, token_ids=[4], text="a", finish_reason="stop"),
        Delta(position=4, index=1, token_ids=[5, 6], text="c", finish_reason="length"),
    ]
    job_id = submitted(http, params={"n": 2})
    ended(http, job_id)
    events = http.get(f"/v1/jobs/{job_id}/events").content.split(b"\n\n")[:-1]
    assert [id_of(event) for event in events] == ["3", "4", "6", "6"]
