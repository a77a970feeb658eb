"""A key that ends, revoked or expired, ends its open streams and answers, its jobs and batches."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from api_keys import bearer, expire, issue, revoke
from penstock.schemas.job import Job
from stage import MODEL, Actor, GatewayProcess, HousekeepingProcess, Line, eventually, spoken

SOON_S = 8.0  # the keys are looked at each second, and jobs each fifth
End = Callable[[str, str], None]
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 50}


@pytest.fixture(scope="module")
def caller(actor: Actor, files: tuple[str, str]) -> Iterator[httpx.Client]:
    issue(actor.redis_url)
    with (
        GatewayProcess(actor.redis_url, *files) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(params=[revoke, expire])
def end(request: pytest.FixtureRequest) -> End:
    """What ends a key."""
    ends: End = request.param
    return ends


@pytest.fixture
def held(actor: Actor) -> Iterator[threading.Event]:
    """A worker that says one token and then waits, until the event is set."""
    free = threading.Event()

    def script(job: Job) -> list[Line]:
        return [spoken("one", " two")[0], free, *spoken("one", " two")[1:]]

    actor.script = script
    yield free
    free.set()


def lines_until_end(http: httpx.Client, key: str, seen: threading.Event) -> tuple[list[str], float]:
    """The lines of a stream's data, and when it ended."""
    with http.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True}, headers=bearer(key)
    ) as got:
        assert got.status_code == 200, got.read()
        lines = []
        for line in got.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                seen.set()
    return lines, time.monotonic()


def test_a_stream_ends_with_an_error_and_its_job_is_cancelled(
    caller: httpx.Client, actor: Actor, held: threading.Event, end: End
) -> None:
    key, other = issue(actor.redis_url), issue(actor.redis_url)
    eventually(lambda: caller.get("/v1/models", headers=bearer(other)).is_success)
    seen, seen_of_other = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(lines_until_end, caller, key, seen)
        beside = pool.submit(lines_until_end, caller, other, seen_of_other)
        num_before = len(actor.cancelled)
        assert seen.wait(20) and seen_of_other.wait(20)
        began_s = time.monotonic()
        end(actor.redis_url, key)
        lines, ended_s = stream.result()
        assert ended_s - began_s < SOON_S
        assert lines[-1] == "[DONE]"
        error = json.loads(lines[-2])["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert "expired, or was revoked" in error["message"]
        eventually(lambda: len(actor.cancelled) > num_before)
        assert not beside.done()
        held.set()
        assert beside.result()[0][-1] == "[DONE]"


def test_an_answer_that_is_awaited_whole_becomes_401(
    caller: httpx.Client, actor: Actor, held: threading.Event, end: End
) -> None:
    key, num_before = issue(actor.redis_url), len(actor.jobs)
    eventually(lambda: caller.get("/v1/models", headers=bearer(key)).is_success)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(caller.post, "/v1/completions", json=BODY, headers=bearer(key))
        eventually(lambda: len(actor.jobs) > num_before)
        end(actor.redis_url, key)
        assert answer.result().status_code == 401
    assert answer.result().json()["error"]["code"] == "invalid_api_key"
    eventually(lambda: actor.jobs[-1].job_id in actor.cancelled)


def test_housekeeping_cancels_jobs_that_nobody_follows(
    caller: httpx.Client, actor: Actor, held: threading.Event, end: End
) -> None:
    """One runs, one waits for its slot, and one for its hour; another key's go on."""
    limits = {"max_running": 1}
    key, other = (issue(actor.redis_url, tenant="acme", limits=limits) for _ in range(2))
    eventually(lambda: caller.get("/v1/models", headers=bearer(other)).is_success)

    def submitted(text: str, **fields: object) -> str:
        answer = caller.post("/v1/jobs", json=BODY | fields, headers=bearer(text))
        return str(answer.json()["id"])

    later = {"delay_ms": 3_600_000}
    mine = [submitted(key), submitted(key), submitted(key, **later)]
    theirs = [submitted(other), submitted(other), submitted(other, **later)]

    def states(ids: list[str]) -> list[str]:
        shown = [caller.get(f"/v1/jobs/{each}", headers=bearer(other)).json() for each in ids]
        return [str(each["state"]) for each in shown]

    eventually(lambda: states(mine + theirs) == ["decoding", "ready", "ready"] * 2)
    with HousekeepingProcess(actor.redis_url):
        end(actor.redis_url, key)
        eventually(lambda: states(mine) == ["cancelled"] * 3, within_s=60)
    assert states(theirs) == ["decoding", "ready", "ready"]


def test_a_batch_submits_no_more_and_ends_as_cancelled(
    caller: httpx.Client,
    actor: Actor,
    held: threading.Event,
    files: tuple[str, str],
    end: End,
) -> None:
    key, other = (issue(actor.redis_url, tenant="acme") for _ in range(2))
    eventually(lambda: caller.get("/v1/models", headers=bearer(other)).is_success)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
    lines = [json.dumps({**line, "custom_id": str(number)}) for number in range(8)]
    upload = {"file": ("in.jsonl", "\n".join(lines))}
    file = caller.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=bearer(key))
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch_id = caller.post("/v1/batches", json=asked, headers=bearer(key)).json()["id"]

    def shown() -> dict[str, object]:
        batch: dict[str, object] = caller.get(
            f"/v1/batches/{batch_id}", headers=bearer(other)
        ).json()
        return batch

    num_before = len(actor.jobs)
    with HousekeepingProcess(actor.redis_url, *files, "--batch-window", "2"):
        eventually(lambda: len(actor.jobs) == num_before + 2)
        end(actor.redis_url, key)
        eventually(lambda: shown()["status"] == "cancelled", within_s=60)
    assert len(actor.jobs) == num_before + 2
