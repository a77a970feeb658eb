"""What a key may use, as callers see it: refusals that say when to come back, jobs that wait."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest
import redis

from api_keys import bearer, issue
from penstock.compose.server import Server
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import BudgetExceeded
from penstock.schemas.event import Failed
from penstock.schemas.keys import Lane
from stage import MODEL, Actor, GatewayProcess, HousekeepingProcess, Wait, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}


@pytest.fixture(scope="module")
def idle() -> Iterator[httpx.Client]:
    """A gateway whose model no worker serves: what is submitted waits."""
    with Server() as server:
        with Actor(server.url) as actor:
            actor.script = lambda job: spoken("x")
        with (
            GatewayProcess(server.url) as gateway,
            httpx.Client(base_url=gateway.url, timeout=60) as client,
        ):
            client.headers = httpx.Headers({"x-redis": server.url})
            yield client


@contextmanager
def caller(http: httpx.Client, redis_url: str, **limits: object) -> Iterator[httpx.Client]:
    """A client with a key of these limits, once the gateway knows it."""
    headers = bearer(issue(redis_url, tenant="acme", limits=limits))
    eventually(lambda: http.get("/version", headers=headers).is_success, 60)
    with httpx.Client(base_url=http.base_url, headers=headers, timeout=60) as client:
        yield client


def refused(answer: httpx.Response, code: str) -> int:
    """Milliseconds after which to try again."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, code), answer.text
    assert answer.json()["error"]["type"] == "rate_limit_error"
    wait_ms = int(answer.headers["retry-after-ms"])
    assert wait_ms > 0 and int(answer.headers["retry-after"]) == -(-wait_ms // 1000)
    return wait_ms


def test_the_fourth_request_of_three_a_minute_is_told_when_to_come_back(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("x")
    limits = {"requests_per_minute": 3, "tokens_per_minute": 1000}
    with (
        caller(http, actor.redis_url, **limits) as one,
        caller(http, actor.redis_url, requests_per_minute=3) as other,
    ):
        for left in (2, 1, 0):
            answer = one.post("/v1/completions", json=TEXT)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert 900 < int(answer.headers["x-ratelimit-remaining-tokens"]) <= 1000
            assert 0 < float(answer.headers["x-ratelimit-reset-requests"].rstrip("s")) <= 60
        for path, body in (("completions", TEXT), ("completions", TEXT | {"stream": True})):
            answer = one.post(f"/v1/{path}", json=body)
            assert refused(answer, "rate_limited") <= 60_000
            said = answer.json()["error"]["message"]
            assert said.startswith("requests_per_minute: the 3 requests of this minute are used up")
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert answer.headers["x-should-retry"] == "true"
        assert other.post("/v1/completions", json=TEXT).is_success


def test_a_job_that_waits_for_its_rate_says_so_at_once_and_until_when(
    http: httpx.Client, actor: Actor
) -> None:
    """In the very answer to its submission, before any worker looked at it."""
    actor.script = lambda job: spoken("x")
    body = TEXT | {"over_limit": "wait"}
    with caller(http, actor.redis_url, requests_per_minute=1) as one:
        first, second, third = [one.post("/v1/jobs", json=body).json() for _ in range(3)]
        assert (second["reason"], third["reason"]) == ("rate", "rate")
        assert 30_000 < second["eta_ms"] <= 60_000
        assert second["eta_ms"] + 30_000 < third["eta_ms"] <= 120_000

        def state(job: JsonObject) -> object:
            return one.get(f"/v1/jobs/{job['id']}").json()["state"]

        eventually(lambda: state(first) == "succeeded")
        assert state(second) == "ready"
        with redis.Redis.from_url(actor.redis_url, decode_responses=True) as store:
            parked = f"{Lane(MODEL).prefix}parked"
            [name] = [each for each in store.zrange(parked, 0, -1) if each.startswith("acme")]
            store.hincrby(f"{Lane(MODEL).prefix}account:{name}", "minute", -60_000)
            store.zadd(parked, {name: 1})
        eventually(lambda: state(second) == "succeeded")
        shown = one.get(f"/v1/jobs/{third['id']}").json()
        assert (shown["state"], shown["reason"]) == ("ready", "rate")
        assert 30_000 < shown["eta_ms"] <= 60_000


def test_what_is_over_its_tokens_is_told_so_and_how_many_there_are(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("x")
    with caller(http, actor.redis_url, requests_per_minute=9, tokens_per_minute=300) as one:
        assert one.post("/v1/completions", json=TEXT | {"max_tokens": 1}).is_success
        answer = one.post("/v1/completions", json=TEXT | {"max_tokens": 299})
        refused(answer, "rate_limited")
        assert answer.json()["error"]["message"].startswith("tokens_per_minute: of the 300 tokens")


def test_openais_client_sees_a_rate_limit(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("x")
    with caller(http, actor.redis_url, requests_per_minute=1) as one:
        key = one.headers["authorization"].removeprefix("Bearer ")
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0)
        assert client.completions.create(model=MODEL, prompt="hi").choices[0].text == "x"
        with pytest.raises(openai.RateLimitError) as failure:
            client.completions.create(model=MODEL, prompt="hi")
    assert failure.value.code == "rate_limited"


def test_a_repeat_under_an_idempotency_key_is_not_counted(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: spoken("x")
    with caller(http, actor.redis_url, requests_per_minute=1) as one:
        key = {"idempotency-key": "counted-once"}
        for _ in range(3):
            assert one.post("/v1/completions", json=TEXT, headers=key).is_success
        refused(one.post("/v1/completions", json=TEXT), "rate_limited")


@pytest.mark.parametrize("way", ["body", "header"])
def test_over_the_rate_a_job_may_wait_instead(http: httpx.Client, actor: Actor, way: str) -> None:
    actor.script = lambda job: spoken("x")
    with caller(http, actor.redis_url, requests_per_minute=1) as one:
        assert one.post("/v1/completions", json=TEXT).is_success
        asked = {"over_limit": "wait"} if way == "body" else {}
        header = {"x-penstock-over-limit": "wait"} if way == "header" else {}
        accepted = one.post("/v1/jobs", json=TEXT | asked, headers=header)
        assert accepted.status_code == 202
        url = f"/v1/jobs/{accepted.json()['id']}"
        eventually(lambda: one.get(url).json()["reason"] == "rate", 60)
        shown = one.get(url).json()
        assert shown["state"] == "ready" and shown["position"] == 1
        assert 0 < shown["eta_ms"] <= 60_000
        assert one.delete(url).is_success
        wrong = one.post("/v1/jobs", json=TEXT | {"over_limit": "never"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "over_limit")


def test_beyond_max_running_a_job_waits_and_says_why(http: httpx.Client, actor: Actor) -> None:
    held = Wait()
    actor.script = lambda job: [held, *spoken("x")]
    with caller(http, actor.redis_url, max_running=1) as one:
        urls = [f"/v1/jobs/{one.post('/v1/jobs', json=TEXT).json()['id']}" for _ in range(2)]
        eventually(lambda: one.get(urls[1]).json()["reason"] == "running", 60)
        held.set()
        for url in urls:
            eventually(lambda url=url: one.get(url).json()["state"] == "succeeded", 60)
        assert one.get(urls[1]).json()["reason"] is None


def test_a_spent_budget_is_told_with_the_time_of_its_renewal(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("a", "b")
    with caller(http, actor.redis_url, tokens_per_month=7) as one:
        assert one.post("/v1/completions", json=TEXT).json()["usage"]["total_tokens"] == 7
        answer = one.post("/v1/completions", json=TEXT)
        wait_ms = refused(answer, "budget_exceeded")
        reset_at = answer.json()["error"]["reset_at"]
        assert datetime.fromtimestamp(reset_at, UTC).strftime("%d %X") == "01 00:00:00"
        assert abs(reset_at - time.time() - wait_ms / 1000) < 60
        assert wait_ms <= 31 * 86_400_000
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_that_ended_for_its_budget_says_so_too(
    http: httpx.Client, actor: Actor, stream: bool
) -> None:
    reset_at = int(time.time()) + 3600
    body = BudgetExceeded("it is used up", reset_at=reset_at).body()
    actor.script = lambda job: [Failed(position=0, state="failed", error=body)]
    with caller(http, actor.redis_url) as one:
        answer = one.post("/v1/completions", json=TEXT | {"stream": stream})
    assert 3_500_000 < refused(answer, "budget_exceeded") <= 3_600_000
    assert answer.json()["error"]["reset_at"] == reset_at
    assert answer.headers["x-should-retry"] == "false"


def test_no_more_than_max_queued_may_wait_and_background_needs_no_worker(
    idle: httpx.Client,
) -> None:
    with caller(idle, idle.headers["x-redis"], max_queued=2) as one:
        accepted = [one.post("/v1/jobs", json=TEXT) for _ in range(2)]
        assert [answer.status_code for answer in accepted] == [202, 202]
        answer = one.post("/v1/jobs", json=TEXT)
        refused(answer, "rate_limited")
        assert "max_queued" in answer.json()["error"]["message"]
        answer = one.post("/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        shown = one.get(f"/v1/jobs/{accepted[1].json()['id']}").json()
        assert (shown["state"], shown["reason"], shown["position"]) == ("ready", "no_worker", 2)
        for each in accepted:
            assert one.delete(f"/v1/jobs/{each.json()['id']}").is_success


def test_a_deadline_that_cannot_be_met_is_refused_at_once(http: httpx.Client, actor: Actor) -> None:
    actor.script = lambda job: [0.02, *spoken("x")]
    with caller(http, actor.redis_url) as one:
        for _ in range(12):  # what the rate is made of
            assert one.post("/v1/completions", json=TEXT).is_success
    with caller(http, actor.redis_url, max_running=1) as one:
        held = Wait()
        actor.script = lambda job: [held, *spoken("x")]
        urls = [f"/v1/jobs/{one.post('/v1/jobs', json=TEXT).json()['id']}" for _ in range(40)]
        answer = one.post("/v1/jobs", json=TEXT | {"timeout_ms": 1})
        refused(answer, "deadline_unmeetable")
        assert answer.json()["error"]["param"] == "timeout_ms"
        for url in urls:
            assert one.delete(url).is_success
        held.set()


def test_what_a_job_was_given_is_shown_while_it_waits_and_after(
    http: httpx.Client, actor: Actor, idle: httpx.Client
) -> None:
    metadata = {"invoice": "12", "who": '日本 "x" \\ {}'}
    fields = {"metadata": metadata, "priority_class": "batch", "queue_timeout_ms": 3_600_000}
    with caller(idle, idle.headers["x-redis"]) as one:
        url = f"/v1/jobs/{one.post('/v1/jobs', json=TEXT | fields).json()['id']}"
        shown = one.get(url).json()
        assert (shown["metadata"], shown["priority_class"]) == (metadata, "batch")
        assert one.delete(url).is_success
    actor.script = lambda job: spoken("x")
    with caller(http, actor.redis_url) as one:
        url = f"/v1/jobs/{one.post('/v1/jobs', json=TEXT | fields).json()['id']}"
        eventually(lambda: one.get(url).json()["state"] == "succeeded", 60)
        assert one.get(url).json()["metadata"] == metadata
        assert one.get(url).json()["position"] is None
        assert actor.jobs[-1].queue_timeout_ms == 3_600_000


@pytest.mark.parametrize(
    "form",
    [
        lambda now_s: {"not_before": int(now_s) + 3600},
        lambda now_s: {
            "not_before": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s + 3600))
        },
        lambda now_s: {"not_before_ms": int(now_s + 3600) * 1000},
        lambda now_s: {"delay_ms": 3_600_000},
    ],
)
def test_a_job_may_wait_for_its_time(http: httpx.Client, actor: Actor, form: object) -> None:
    assert callable(form)
    with caller(http, actor.redis_url) as one:
        answer = one.post("/v1/jobs", json=TEXT | form(time.time()))
        assert answer.status_code == 202, answer.text
        url = f"/v1/jobs/{answer.json()['id']}"
        shown = one.get(url).json()
        assert (shown["state"], shown["reason"]) == ("ready", "delayed")
        assert 3_000_000 < shown["eta_ms"] <= 3_700_000
        assert one.post(f"{url}/cancel").json()["state"] == "cancelled"


@pytest.mark.slow
def test_a_batchs_lines_count_for_its_key(actor: Actor, tmp_path: Path) -> None:
    actor.script = lambda job: spoken("a", "b")
    folder = ("--files-folder", str(tmp_path))
    line = {"method": "POST", "url": "/v1/completions", "body": TEXT}
    content = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(3))
    with (
        GatewayProcess(actor.redis_url, *folder) as gateway,
        HousekeepingProcess(actor.redis_url, *folder),
        redis.Redis.from_url(actor.redis_url) as client,
    ):
        key = issue(actor.redis_url, tenant="acme", limits={"max_running": 1})
        account = f"acme/{key.split('_')[1]}"
        api = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=9)
        eventually(lambda: httpx.get(f"{gateway.url}/version", headers=bearer(key)).is_success, 60)
        file = api.files.create(file=("in.jsonl", content.encode()), purpose="batch").id
        batch = api.batches.create(
            input_file_id=file, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(lambda: api.batches.retrieve(batch.id).status == "completed", 90)
        ledgers = client.keys(f"*:usage:*:{account}")
        assert {client.hget(ledger, "jobs") for ledger in ledgers} == {b"3"}


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"not_before": "tomorrow"}, "not_before"),
        ({"not_before": "2026-01-01T00:00:00"}, "not_before"),
        ({"not_before": -1}, "not_before"),
        ({"not_before": 1e300}, "not_before"),
        ({"not_before": [1]}, "not_before"),
        ({"not_before": True}, "not_before"),
        ({"queue_timeout_ms": 0}, "queue_timeout_ms"),
        ({"timeout_ms": "1"}, "timeout_ms"),
        ({"priority": "high"}, "priority"),
        ({"metadata": {"k": 1}}, "metadata.k"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    http: httpx.Client, actor: Actor, fields: dict[str, object], param: str
) -> None:
    with caller(http, actor.redis_url) as one:
        answer = one.post("/v1/jobs", json=TEXT | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
