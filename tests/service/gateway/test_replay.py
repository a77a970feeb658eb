"""A job that is run again says the same, and where it does not that is told."""

import json

import httpx
import pytest

from penstock.compose.server import Server
from penstock.gateway.commands.replay import main
from penstock.gateway.sync_client import SyncClient
from penstock.worker.bundled.paths import BUNDLED_DRAFT
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, failed, spoken
from worker_process import WorkerProcess


def stored(http: httpx.Client, **more: object) -> str:
    body = {"model": MODEL, "input": "hi", "background": True, **more}
    return http.post("/v1/responses", json=body).json()["id"]


def test_the_same_seed_is_used_and_a_difference_is_told(
    actor: Actor, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    actor.script = lambda job: spoken("a", "b", "c")
    made, at = stored(http), ["--redis-url", actor.redis_url]
    eventually(lambda: http.get(f"/v1/responses/{made}").json()["status"] == "completed")
    assert main([made, *at]) == 0
    assert "the same" in capsys.readouterr().out
    first, again = actor.jobs[-2:]
    assert first.params.seed is None and again.params.seed == first.seed
    assert (again.chat, again.job_id == first.job_id) == (first.chat, False)
    actor.script = lambda job: spoken("a", "x", "c")
    assert main([made, "--json", *at]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["choices"] == [
        {
            "index": 0, "num_tokens": 3, "is_same": False, "differs_at": None,
            "before": "abc", "after": "axc",
        }
    ]  # fmt: skip


def test_a_job_can_be_run_again_where_its_request_was_to_be_kept(
    actor: Actor, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    actor.script = lambda job: spoken("a", "b")
    body, at = {"model": MODEL, "prompt": "hi"}, ["--redis-url", actor.redis_url]
    with SyncClient(actor.redis_url) as client:
        by_sdk = client.enqueue("hi", model=MODEL, keep_request=True)
        assert client.result(by_sdk) is not None
    made = [
        http.post("/v1/jobs", json=body | more).json()["id"]
        for more in ({"keep_request": True}, {})
    ]
    for job_id in made:
        eventually(lambda job_id=job_id: http.get(f"/v1/jobs/{job_id}").json()["ended_ms"])
    assert [main([each, *at]) for each in (by_sdk, *made)] == [0, 0, 1]
    assert "keep_request" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(
    actor: Actor, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    held, at = Wait(), ["--redis-url", actor.redis_url]
    actor.script = lambda job: [held, *spoken("a")]
    running = stored(http)
    assert main([running, *at]) == 1
    assert "has not ended" in capsys.readouterr().err
    held.set()
    actor.script = lambda job: [failed(at=0)]
    wrong = stored(http)
    eventually(lambda: http.get(f"/v1/responses/{wrong}").json()["status"] == "failed")
    assert main([wrong, *at]) == 1
    assert "ended as failed" in capsys.readouterr().err
    actor.script = lambda job: spoken("a")
    shown_once = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).json()["id"]
    assert main([shown_once, *at]) == 1
    assert "stored" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_says_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        Server() as server,
        WorkerProcess(server.url, BUNDLED_DRAFT, "--deterministic").ready(),
        GatewayProcess(server.url) as gateway,
    ):
        asked = {
            "input": "Once upon a time",
            "max_output_tokens": 40,
            "temperature": 1,
            "ignore_eos": True,
        }
        body = {"model": BUNDLED_DRAFT.name, **asked}
        made = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=60).json()["id"]
        assert main([made, "--redis-url", server.url, "--json"]) == 0
        [told] = json.loads(capsys.readouterr().out)["choices"]
        assert told["is_same"] and told["num_tokens"] == 40
