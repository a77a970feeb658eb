"""Share tokens: one job, to read, until they expire. And what erasing a job leaves."""

import asyncio
import time

import httpx
import pytest
import redis

from api_keys import bearer, issue
from penstock.compose.server import Server
from penstock.gateway.auth.share_tokens import Shares
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, spoken

MARK = "canary-7f3a"


@pytest.fixture(scope="module", autouse=True)  # before the gateway starts
def mine(actor: Actor) -> dict[str, str]:
    return bearer(issue(actor.redis_url, tenant="acme"))


@pytest.fixture(scope="module", autouse=True)
def other(actor: Actor) -> dict[str, str]:
    return bearer(issue(actor.redis_url, tenant="rival"))


def submitted(http: httpx.Client, headers: dict[str, str], mark: str = MARK) -> str:
    body = {"model": MODEL, "prompt": f"hi {mark}", "metadata": {"note": mark}}
    response = http.post("/v1/jobs", json=body, headers=headers)
    assert response.status_code == 202, response.text
    job_id: str = response.json()["id"]
    return job_id


def ended(http: httpx.Client, job_id: str, headers: dict[str, str]) -> None:
    url = f"/v1/jobs/{job_id}"
    eventually(lambda: http.get(url, headers=headers).json()["ended_ms"] is not None, 60)


def shared(http: httpx.Client, job_id: str, headers: dict[str, str], **fields: int) -> str:
    response = http.post(f"/v1/jobs/{job_id}/share", json=fields, headers=headers)
    assert response.status_code == 200, response.text
    token: str = response.json()["token"]
    return token


def test_a_token_reads_status_result_and_stream_of_its_job(
    http: httpx.Client, actor: Actor, mine: dict[str, str]
) -> None:
    actor.script = lambda job: spoken("for", " all")
    job_id = submitted(http, mine)
    token = shared(http, job_id, mine)
    assert "acme" not in token and job_id not in token
    ended(http, job_id, mine)
    shown = http.get(f"/v1/jobs/{job_id}", params={"share": token}).json()
    assert shown["result"]["choices"][0]["text"] == "for all"
    assert MARK not in str(shown)
    events = http.get(f"/v1/jobs/{job_id}/events", headers=bearer(token))
    assert events.text.count('"type":"delta"') == 2
    made = http.post(f"/v1/jobs/{job_id}/share", headers=mine).json()  # no body: an hour
    assert 3500 < made["expires_at"] - time.time() <= 3600
    assert http.get(made["url"]).text == events.text


def test_a_token_opens_nothing_else(
    http: httpx.Client, actor: Actor, mine: dict[str, str], other: dict[str, str]
) -> None:
    actor.script = lambda job: spoken("x")
    job_id, second = submitted(http, mine), submitted(http, mine)
    token = shared(http, job_id, mine)
    tries = [
        ("GET", f"/v1/jobs/{second}"),
        ("GET", f"/v1/jobs/{submitted(http, other)}"),
        ("GET", f"/v1/jobs/{job_id[:-1]}{'a' if job_id[-1] != 'a' else 'b'}"),
        ("GET", "/v1/jobs/nonsense"),
        ("GET", f"/v1/jobs/{job_id}/share"),
        ("POST", f"/v1/jobs/{job_id}/share"),
        ("POST", f"/v1/jobs/{job_id}/cancel"),
        ("DELETE", f"/v1/jobs/{job_id}"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
    ]
    for method, path in tries:
        for auth in ({"params": {"share": token}}, {"headers": bearer(token)}):
            answer = http.request(method, path, **auth)  # type: ignore[arg-type]
            assert answer.status_code == 401, (method, path)
    ended(http, job_id, mine)


def test_a_token_that_was_changed_or_is_old_opens_nothing(
    http: httpx.Client, actor: Actor, mine: dict[str, str]
) -> None:
    actor.script = lambda job: spoken("x")
    job_id = submitted(http, mine)
    token = shared(http, job_id, mine, expires_s=1)
    _, expires_s, signature = token.split("_")
    later = f"pss_{int(expires_s) + 3600}_{signature}"
    wrong = f"pss_{expires_s}_{'a' * 52}"
    for text in (later, wrong, "pss_", "pss_9999999999_", f"pss_-1_{signature}", "x" * 5000, "é"):
        answer = http.get(f"/v1/jobs/{job_id}", params={"share": text})
        assert answer.status_code == 401, text[:80]
    url = f"/v1/jobs/{job_id}"
    eventually(lambda: http.get(url, params={"share": token}).status_code == 401, 60)
    forged, _ = asyncio.run(Shares(b"another secret", nobody, now_ms).issue(job_id, "acme", 3600))
    assert http.get(url, params={"share": forged}).status_code == 401


async def nobody(job_id: str) -> str | None:
    return None


async def now_ms() -> int:
    return int(time.time() * 1000)


def test_who_may_not_see_a_job_may_not_share_it(
    http: httpx.Client, actor: Actor, mine: dict[str, str], other: dict[str, str]
) -> None:
    job_id = submitted(http, mine)
    for headers, status in ((other, 404), ({}, 401)):
        assert http.post(f"/v1/jobs/{job_id}/share", headers=headers).status_code == status
    for fields in ({"expires_s": 0}, {"expires_s": 10**9}, {"expires_s": "1"}, {"lasts": 1}):
        url = f"/v1/jobs/{job_id}/share"
        assert http.post(url, json=fields, headers=mine).status_code == 400


def holding(redis_url: str, mark: str) -> list[str]:
    """Each key and each part of a value of Redis's that has the mark, after the key before it."""
    found = []
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(count=1000):
            found.append(key)
            match client.type(key):
                case b"string":
                    found.append(client.get(key))
                case b"hash":
                    found += client.hgetall(key).items()
                case b"list":
                    found += client.lrange(key, 0, -1)
                case b"set":
                    found += client.smembers(key)
                case b"zset":
                    found += client.zrange(key, 0, -1)
                case b"stream":
                    found += client.xrange(key)
                case b"none":  # gone since the scan
                    continue
                case kind:
                    raise AssertionError(f"{key!r} is a {kind!r}")
    return [f"{found[at - 1]} {each}" for at, each in enumerate(found) if mark in str(each)]


def test_erasing_leaves_nothing_of_an_ended_job(
    http: httpx.Client, actor: Actor, mine: dict[str, str], other: dict[str, str]
) -> None:
    mark = "canary-ended"
    actor.script = lambda job: spoken("said", f" {mark}")
    job_id = submitted(http, mine, mark)
    token = shared(http, job_id, mine)
    ended(http, job_id, mine)
    assert holding(actor.redis_url, mark)
    for method, path in (("GET", "/events"), ("GET", ""), ("DELETE", "")):
        answer = http.request(method, f"/v1/jobs/{job_id}{path}", headers=other)
        assert answer.status_code == 404
    assert http.delete(f"/v1/jobs/{job_id}", headers=mine).json()["deleted"]
    assert holding(actor.redis_url, mark) == []
    for path in ("", "/events"):
        assert http.get(f"/v1/jobs/{job_id}{path}", headers=mine).status_code == 404
        answer = http.get(f"/v1/jobs/{job_id}{path}", params={"share": token})
        assert answer.status_code == 401


def test_erasing_leaves_nothing_of_a_running_job() -> None:
    with Server() as server, Actor(server.url) as alone, GatewayProcess(server.url) as gateway:
        held = Wait()
        alone.script = lambda job: [*spoken(f"say {MARK}", "x")[:1], held, *spoken("a", "b")[1:]]
        url = f"{gateway.url}/v1/jobs"
        body = {"model": MODEL, "prompt": f"hi {MARK}", "metadata": {"note": f"note {MARK}"}}
        job_id = httpx.post(url, json=body).json()["id"]
        eventually(lambda: httpx.get(f"{url}/{job_id}").json()["num_tokens"] == 1, 60)
        assert holding(server.url, f"hi {MARK}")
        assert httpx.delete(f"{url}/{job_id}").is_success
        for kept in (f"hi {MARK}", f"note {MARK}"):  # while it still runs
            assert holding(server.url, kept) == []
        eventually(lambda: httpx.get(f"{url}/{job_id}").status_code == 404, 60)
        assert holding(server.url, MARK) == []


def test_erasing_leaves_nothing_of_a_waiting_job() -> None:
    with Server() as server:
        with Actor(server.url):
            pass  # its model stays known
        with GatewayProcess(server.url) as gateway:
            body = {"model": MODEL, "prompt": MARK, "metadata": {"note": MARK}}
            job_id = httpx.post(f"{gateway.url}/v1/jobs", json=body).json()["id"]
            assert holding(server.url, MARK)
            assert httpx.delete(f"{gateway.url}/v1/jobs/{job_id}").is_success
            assert holding(server.url, MARK) == []
