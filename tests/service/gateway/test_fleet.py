"""Queues that are paused and workers that drain, by the commands and over HTTP."""

import json

import httpx
import pytest

from penstock.compose.server import Server
from penstock.gateway.commands import queues, workers
from stage import MODEL, Actor, Wait, eventually, spoken
from worker_process import WorkerProcess

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


def background(http: httpx.Client) -> str:
    return http.post("/v1/jobs", json=CHAT).json()["id"]


def shown(http: httpx.Client, job_id: str) -> dict[str, object]:
    return http.get(f"/v1/jobs/{job_id}").json()


def test_of_a_paused_queue_no_job_begins_and_what_runs_runs_on(
    actor: Actor, admin: httpx.Client
) -> None:
    gate = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], gate, *spoken("a", "b")[1:]]
    running = background(admin)
    eventually(lambda: shown(admin, running)["started_ms"] is not None)
    paused = admin.post(f"/v1/admin/queues/{MODEL}/pause").json()
    assert (paused["is_paused"], paused["num_running"]) == (True, 1)
    waiting = background(admin)
    gate.set()
    eventually(lambda: shown(admin, running)["state"] == "succeeded")
    told = shown(admin, waiting)
    assert (told["state"], told["reason"], told["position"]) == ("ready", "paused", 1)
    assert 'reason="paused"} 1.0' in admin.get("/metrics").text
    assert admin.get("/load").json() == {"server_load": 1}
    [model] = admin.get("/v1/status").json()["models"]
    assert model["is_paused"] is True
    assert admin.get("/v1/admin/queues").json()["data"] == [
        paused | {"num_queued": 1, "num_running": 0}
    ]
    assert admin.post(f"/v1/admin/queues/{MODEL}/resume").json()["is_paused"] is False
    eventually(lambda: shown(admin, waiting)["state"] == "succeeded")
    assert admin.post("/v1/admin/queues/nobody/pause").status_code == 404


def test_the_commands_do_the_same(
    actor: Actor, admin: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    actor.script = lambda job: spoken("a")
    at = ["--redis-url", actor.redis_url]
    assert queues.main(["pause", MODEL, *at]) == 0
    assert "paused" in capsys.readouterr().out
    assert queues.main(["list", "--json", *at]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["model"], listed["is_paused"]) == (MODEL, True)
    assert queues.main(["resume", MODEL, *at]) == 0
    assert "open" in capsys.readouterr().out
    assert queues.main(["pause", "nobody", *at]) == 1
    assert f"served: {MODEL}" in capsys.readouterr().err
    assert workers.main(["drain", "nobody", *at]) == 1
    assert "no worker 'nobody'" in capsys.readouterr().err


def test_jobs_are_aborted_by_the_ids_of_their_answers(actor: Actor, admin: httpx.Client) -> None:
    gate = Wait()
    actor.script = lambda job: [*spoken("a", "b")[:1], gate, *spoken("a", "b")[1:]]
    asked = CHAT | {"stream": True}
    with admin.stream("POST", "/v1/chat/completions", json=asked) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        unknown = f"cmpl-job_{first['id'].split('_')[1]}_{'a' * 26}"
        ids = [first["id"], unknown, "anything"]
        told = admin.post("/abort_requests", json={"request_ids": ids}).json()
        gate.set()
        assert any('"cancelled"' in line for line in lines)
    assert told == {"aborted": [first["id"].removeprefix("chatcmpl-")]}
    refused = admin.post("/inference/v1/abort_requests", json={"request_ids": []})
    assert refused.status_code == 400


def test_what_a_server_says_of_itself_has_no_secret(actor: Actor, admin: httpx.Client) -> None:
    told = admin.get("/server_info").json()
    assert [each["name"] for each in told["models"]] == [MODEL]
    assert told["settings"]["max_body_bytes"] > 0
    assert all(isinstance(value, int | float) for value in told["settings"].values())


def test_a_worker_that_is_told_to_drain_ends_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Server() as server, WorkerProcess(server.url) as worker:
        worker.ready()
        at = ["--redis-url", server.url]
        assert workers.main(["list", "--json", *at]) == 0
        [listed] = json.loads(capsys.readouterr().out)
        assert (listed["state"], listed["num_running"]) == ("serving", 0)
        assert workers.main(["drain", listed["worker"], *at]) == 0
        assert worker.process.wait(20) == 0
        assert workers.main(["drain", listed["worker"], *at]) == 1
