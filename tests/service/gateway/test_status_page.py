"""The status page is served, its figures are true, and its stream holds up no shutdown."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from api_keys import bearer, issue
from penstock.compose.server import Server
from stage import GatewayProcess, eventually
from worker_process import WorkerProcess


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Server]:
    with Server() as server, WorkerProcess(server.url).ready():
        yield server


def test_the_page_is_open_and_loads_nothing_from_elsewhere(fake_server: Server) -> None:
    with GatewayProcess(fake_server.url, "--api-key", "k" * 40) as gateway:
        for path, kind in [
            ("/", "html"),
            ("/page/page.css", "css"),
            ("/page/page.js", "javascript"),
        ]:
            answer = httpx.get(gateway.url + path)
            assert answer.status_code == 200 and kind in answer.headers["content-type"]
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "://" not in answer.text
        for path in ("/v1/status", "/v1/status/events"):
            assert httpx.get(gateway.url + path).status_code == 401


def test_it_tells_what_runs(fake_server: Server) -> None:
    with GatewayProcess(fake_server.url) as gateway:
        body = {"model": "fake", "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        asked = httpx.post(
            f"{gateway.url}/v1/completions", json=body | {"stream": True}, timeout=60
        )
        assert asked.status_code == 200

        def is_told() -> bool:
            seen = httpx.get(f"{gateway.url}/v1/status").json()
            [worker], [model] = seen["workers"], seen["models"]
            return (worker["generation_tokens"], worker["state"], model["num_ended"]) == (
                30,
                "serving",
                1,
            )

        eventually(is_told, within_s=30)
        seen = httpx.get(f"{gateway.url}/v1/status").json()
        ttft = seen["latencies"]["ttft"]
        assert len(ttft["counts"]["fake"]) == len(ttft["bounds_s"])
        assert ttft["counts"]["fake"][-1] == 1
        assert seen["latencies"]["itl"]["counts"]["fake"][-1] >= 1


def test_a_caller_sees_its_own_jobs_and_accounts_and_an_operator_all_accounts() -> None:
    with Server() as server, WorkerProcess(server.url).ready():
        keys = {
            "acme": issue(server.url, tenant="acme", scopes=["inference", "jobs", "metrics"]),
            "other": issue(server.url, tenant="other", scopes=["inference", "metrics"]),
            "boss": issue(server.url, tenant="boss", scopes=["admin"]),
        }
        flags = ("--enable-per-request-metrics",)
        with GatewayProcess(server.url, *flags) as gateway, httpx.Client(timeout=60) as http:

            def seen(who: str) -> dict[str, list[dict[str, object]]]:
                shown = http.get(f"{gateway.url}/v1/status", headers=bearer(keys[who]))
                found: dict[str, list[dict[str, object]]] = shown.json()
                return found

            ids = []
            for who in ("acme", "other"):
                body = {"model": "fake", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
                answer = http.post(
                    f"{gateway.url}/v1/completions", json=body, headers=bearer(keys[who])
                ).json()
                ids.append(answer["id"].removeprefix("cmpl-"))
                assert answer["metrics"]["num_attempts"] == 1  # the flag's
            eventually(lambda: len(seen("boss")["accounts"]) == 2, within_s=10)
            [acme] = seen("acme")["accounts"]
            assert (acme["tenant"], acme["tokens_today"]) == ("acme", 3 + 1)
            [job] = seen("acme")["jobs"]
            assert job["job_id"] == ids[0]
            assert [each["what"] for each in job["timeline"]] == [  # type: ignore[attr-defined]
                "queued",
                "started",
                "first_token",
                "succeeded",
            ]
            assert seen("other")["jobs"] == [], "a key without the scope `jobs`"
            assert [each["tenant"] for each in seen("other")["accounts"]] == ["other"]
            listed = http.get(f"{gateway.url}/v1/jobs?limit=5", headers=bearer(keys["acme"])).json()
            assert [each["id"] for each in listed["data"]] == ids[:1]
            none = http.get(f"{gateway.url}/v1/jobs", headers=bearer(keys["boss"])).json()
            assert none == {"object": "list", "data": []}
            bad = http.get(f"{gateway.url}/v1/jobs?limit=101", headers=bearer(keys["acme"]))
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "limit")


def test_its_stream_ends_when_the_gateway_stops(fake_server: Server) -> None:
    with GatewayProcess(fake_server.url) as gateway:
        with httpx.stream("GET", f"{gateway.url}/v1/status/events", timeout=30) as stream:
            lines = stream.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert next(lines) == "" and next(lines).startswith("data: ")
            began_s = time.monotonic()
            gateway.process.terminate()
            list(lines)
        assert gateway.process.wait(60) == 0
    assert first["models"][0]["name"] == "fake"
    assert time.monotonic() - began_s < 20  # of the 30 s that a job's stream may go on


def test_top_shows_the_same_in_a_terminal(fake_server: Server) -> None:
    command = [sys.executable, "-m", "penstock.compose.cli", "top", "--redis-url", fake_server.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert re.search(r"^fake +1 +0 +0 +\d+ +0 +0 +0$", shown, re.MULTILINE), shown
    assert re.search(r"^\S+ +fake +serving +0 of \d+ +0 +0% +- +0$", shown, re.MULTILINE), shown
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    assert [each["state"] for each in json.loads(listed)["workers"]] == ["serving"]
    nobody = subprocess.run(
        [*command[:-1], "redis://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert nobody.returncode == 1 and "--redis-url" in nobody.stderr
    both = subprocess.run(
        [*command, "--json", "--every-s", "2"], capture_output=True, text=True, check=False
    )
    assert both.returncode == 2 and "every" in both.stderr
