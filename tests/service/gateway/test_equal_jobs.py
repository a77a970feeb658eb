"""Requests that ask the same at the same time are computed once, where an operator wants that."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import api_keys
from penstock.compose.server import Server
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, spoken

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def gateways(actor: Actor) -> Iterator[list[httpx.Client]]:
    flag = "--share-equal-jobs"
    with GatewayProcess(actor.redis_url, flag) as one, GatewayProcess(actor.redis_url, flag) as two:
        yield [httpx.Client(base_url=each.url, timeout=60) for each in (one, two)]


@pytest.fixture(autouse=True)
def gate(actor: Actor) -> Wait:
    gate = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], gate, *spoken("a", "b")[1:]]
    actor.jobs.clear()
    return gate


def ask_all(
    actor: Actor,
    gateways: list[httpx.Client],
    gate: Wait,
    bodies: list[dict[str, object]],
    num_jobs: int,
) -> list[dict]:
    """The answers to requests that were made at the same time; so many jobs they had."""

    def ask(number: int) -> dict:
        http = gateways[number % len(gateways)]
        response = http.post("/v1/chat/completions", json=bodies[number])
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(ask, 0)]
        eventually(lambda: len(actor.jobs) == 1)
        asked += [pool.submit(ask, number) for number in range(1, len(bodies))]
        eventually(lambda: len(actor.jobs) >= num_jobs)
        _settle(actor)
        assert not any(each.done() for each in asked)
        gate.set()
        answers = [each.result() for each in asked]
    assert len(actor.jobs) == num_jobs
    return answers


def _settle(actor: Actor) -> None:
    """Wait until nothing more comes: what would be a job of its own would have begun."""
    before = -1
    while before != len(actor.jobs):
        before = len(actor.jobs)
        Wait().wait(0.3)


def test_equal_ones_have_one_job_over_several_gateways(
    actor: Actor, gateways: list[httpx.Client], gate: Wait
) -> None:
    answers = ask_all(actor, gateways, gate, [CHAT] * 8, num_jobs=1)
    assert len({each["id"] for each in answers}) == 1
    assert {each["choices"][0]["message"]["content"] for each in answers} == {"ab"}


def test_what_has_ended_is_computed_again(
    actor: Actor, gateways: list[httpx.Client], gate: Wait
) -> None:
    gate.set()
    ids = [gateways[0].post("/v1/chat/completions", json=CHAT).json()["id"] for _ in range(3)]
    assert len({*ids}) == len(actor.jobs) == 3


OTHERS: dict[str, dict[str, object]] = {
    "another text": {"messages": [{"role": "user", "content": "ho"}]},
    "another length": {"max_tokens": 7},
    "drawn": {"temperature": 1},
    "stored": {"store": True},
    "of another class": {"service_tier": "priority"},
    "of limited time": {"timeout_ms": 60_000},
    "of a limited wait": {"queue_timeout_ms": 60_000},
}


@pytest.mark.parametrize("how", OTHERS)
def test_others_have_their_own(
    actor: Actor, gateways: list[httpx.Client], gate: Wait, how: str
) -> None:
    changed = CHAT | OTHERS[how]
    first = CHAT if how in ("another text", "another length", "of another class") else changed
    answers = ask_all(actor, gateways, gate, [first, changed], num_jobs=2)
    assert len({each["id"] for each in answers}) == 2


def test_a_seed_makes_it_equal(actor: Actor, gateways: list[httpx.Client], gate: Wait) -> None:
    seeded = CHAT | {"temperature": 1, "seed": 4}
    ask_all(actor, gateways, gate, [seeded] * 2, num_jobs=1)


def test_one_that_leaves_takes_nobody_along(
    actor: Actor, gateways: list[httpx.Client], gate: Wait
) -> None:
    with ThreadPoolExecutor(1) as pool:
        streamed = CHAT | {"stream": True}
        with gateways[0].stream("POST", "/v1/chat/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            other = pool.submit(gateways[1].post, "/v1/chat/completions", json=streamed)
            _settle(actor)
        _settle(actor)
        gate.set()
        text = other.result().text
    assert len(actor.jobs) == 1 and not actor.cancelled
    told = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert told[0]["id"] == json.loads(first[6:])["id"]
    said = "".join(each["choices"][0]["delta"].get("content") or "" for each in told)
    assert said == "ab"


def test_nobody_shares_unless_it_is_wanted(actor: Actor, gate: Wait) -> None:
    with GatewayProcess(actor.redis_url) as gateway:
        http = httpx.Client(base_url=gateway.url, timeout=60)
        ask_all(actor, [http], gate, [CHAT] * 2, num_jobs=2)


def test_tenants_share_nothing() -> None:
    gate = Wait()
    with Server() as server, Actor(server.url) as actor:
        actor.script = lambda job: [gate, *spoken("a")]
        keys = [api_keys.issue(server.url, tenant=tenant) for tenant in ("ann", "bob")]
        with (
            GatewayProcess(server.url, "--share-equal-jobs") as gateway,
            ThreadPoolExecutor(2) as pool,
        ):
            asked = [
                pool.submit(
                    httpx.post,
                    f"{gateway.url}/v1/chat/completions",
                    json=CHAT,
                    headers=api_keys.bearer(key),
                    timeout=60,
                )
                for key in keys
            ]
            eventually(lambda: len(actor.jobs) == 2)
            gate.set()
            assert len({each.result().json()["id"] for each in asked}) == 2
