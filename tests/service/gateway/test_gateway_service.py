"""The gateway as a service: health, keys, limits, metrics, and what it does without a queue."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.compose.server import Server
from penstock.gateway.metrics.lane_metrics import LaneReport
from penstock.gateway.metrics.metrics import Metrics, Seen
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server.cli import main
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.metrics import names
from penstock.schemas.model import WorkerCard
from penstock.schemas.process.start import load_settings
from stage import MODEL, Actor, GatewayProcess, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}
OPEN_PATHS = (
    *("/health", "/health/live", "/health/queue", "/health/ready", "/ping"),
    *("/docs", "/openapi.json"),
)
KEYED_PATHS = (
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/v1/jobs/x",
    "/v1/completions",
    "/nowhere",
)


def test_it_is_ready_while_a_worker_lives() -> None:
    with Server() as server, GatewayProcess(server.url) as gateway:
        statuses = {path: httpx.get(gateway.url + path).status_code for path in OPEN_PATHS}
        assert statuses == dict.fromkeys(OPEN_PATHS, 200) | {"/health/ready": 503}
        with Actor(server.url):
            eventually(lambda: httpx.get(gateway.url + "/health/ready").status_code == 200)
            assert httpx.get(gateway.url + "/health/ready").json()["status"] == "ready"
        eventually(lambda: httpx.get(gateway.url + "/health/ready").status_code == 503)
        server.kill()
        eventually(lambda: httpx.get(gateway.url + "/health/queue").status_code == 503)
        assert httpx.get(gateway.url + "/health/live").status_code == 200


def test_without_a_worker_a_caller_is_told_and_a_background_job_waits() -> None:
    with Server() as server, GatewayProcess(server.url) as gateway:
        with Actor(server.url):
            pass  # its model stays known
        refused = httpx.post(gateway.url + "/v1/completions", json=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        assert int(refused.headers["retry-after-ms"]) > 0
        assert refused.headers["x-should-retry"] == "true"
        job_id = httpx.post(gateway.url + "/v1/jobs", json=TEXT).json()["id"]
        with Actor(server.url):
            url = f"{gateway.url}/v1/jobs/{job_id}"
            eventually(lambda: httpx.get(url).json()["state"] == "succeeded")


def test_a_full_queue_is_429_and_takes_again_when_there_is_room() -> None:
    with Server() as server, GatewayProcess(server.url, "--max-num-queued-reqs", "2") as gateway:
        with Actor(server.url):
            pass  # its model stays known
        submit = gateway.url + "/v1/jobs"
        answers = [httpx.post(submit, json=TEXT) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        full = answers[-1]
        assert full.json()["error"]["type"] == "rate_limit_error"
        refused = names.ADMISSION_REJECTIONS + "_total", (MODEL, "max_num_queued_reqs")
        with httpx.Client(base_url=gateway.url) as http:
            shown = samples(http)
        assert shown[refused] == 1 and shown[names.OLDEST_WAITING_SECONDS, ("0", MODEL)] > 0
        waits = full.headers["retry-after-ms"], full.headers["retry-after"]
        assert int(waits[0]) > 0 and int(waits[1]) == -(-int(waits[0]) // 1000)
        client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="hi", extra_body={"background": True})
        with Actor(server.url) as actor:
            eventually(lambda: httpx.post(submit, json=TEXT).status_code == 202)
            eventually(lambda: len(actor.jobs) == 3)


def test_so_is_a_queue_of_long_prompts() -> None:
    flags = ("--max-num-queued-tokens", "1000")
    with Server() as server, GatewayProcess(server.url, *flags) as gateway:
        with Actor(server.url):
            pass
        long: dict[str, object] = {"model": MODEL, "prompt": [7] * 400}
        answers = [httpx.post(gateway.url + "/v1/jobs", json=long) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        error = answers[-1].json()["error"]
        assert error["code"] == "queue_full" and "tokens" in error["message"]
        assert int(answers[-1].headers["retry-after-ms"]) > 0
        with httpx.Client(base_url=gateway.url) as http:
            shown = samples(http)
            assert shown[names.NUM_QUEUED_TOKENS, ("0", MODEL)] == 800
            assert (
                shown[names.ADMISSION_REJECTIONS + "_total", (MODEL, "max_num_queued_tokens")] == 1
            )
            with Actor(server.url):
                eventually(lambda: samples(http)[names.NUM_QUEUED_TOKENS, ("0", MODEL)] == 0)


def test_keys_are_needed_on_every_path_but_those_that_are_open(actor: Actor) -> None:
    actor.script = lambda job: spoken("in")
    with GatewayProcess(actor.redis_url, "--api-key", "alpha", "--api-key", "beta") as gateway:
        for path in OPEN_PATHS:
            assert httpx.get(gateway.url + path).status_code == 200
        for path in KEYED_PATHS:
            for header in (None, "Bearer wrong", "alpha", "Basic alpha", "Bearer alph", "Bearer"):
                headers = {"authorization": header} if header else {}
                refused = httpx.get(gateway.url + path, headers=headers)
                assert refused.status_code == 401, (path, header)
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
        for key in ("alpha", "beta"):
            client = openai.OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0)
            assert client.completions.create(model=MODEL, prompt="hi").choices[0].text == "in"
        stranger = openai.OpenAI(base_url=gateway.url + "/v1", api_key="no", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        _, output = gateway.terminate()
    assert "alpha" not in output and "beta" not in output


def test_no_other_site_may_ask_from_a_browser(http: httpx.Client) -> None:
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=asked).status_code == 405
    answer = http.get("/v1/models", headers=asked)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("given", ["ok-1", "x" * 129, "a b", "é"])
def test_a_request_id_comes_back_or_is_made(http: httpx.Client, given: str) -> None:
    answer = http.get("/health", headers=[(b"x-request-id", given.encode())])
    made = re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] == given if given == "ok-1" else made


def test_the_version_is_the_packages(http: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/version").json()["version"])


def test_the_interface_documents_itself(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    named = {"messages", "tools", "temperature", "logit_bias", "structured_outputs"}
    assert named <= fields.keys()
    assert http.get("/docs").status_code == 200


def samples(http: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Of every line of /metrics: its name and label values."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    lines = [sample for family in families for sample in family.samples]
    shown = {
        (line.name, tuple(line.labels[key] for key in sorted(line.labels))): line.value
        for line in lines
    }
    assert len(shown) == len(lines), "a line is there twice"
    return shown


def test_metrics_count_what_happened_under_vllms_names(http: httpx.Client, actor: Actor) -> None:
    before = samples(http)
    actor.script = lambda job: spoken("a", "b", "c", reason="length")
    for stream in (False, True):
        http.post("/v1/completions", json=TEXT | {"stream": stream})
    http.post("/v1/completions", json=TEXT | {"model": "nobody"})
    after = samples(http)

    def gained(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert gained(names.JOBS_ENDED + "_total", MODEL, "succeeded") == 2
    assert gained(names.HTTP_RESPONSES + "_total", "404") == 1
    assert after[names.REQUESTS_RUNNING, ("actor", MODEL)] == 1
    assert after[names.KV_USAGE, ("actor", MODEL)] == 0.5
    assert after[names.JOBS_QUEUED, ("0", MODEL)] == 0
    assert not any("nobody" in labels for _, labels in after)


def test_labels_stay_few_whatever_callers_send(http: httpx.Client) -> None:
    samples(http)  # so that what it counts itself was seen before
    before = len(samples(http))
    for number in range(200):
        fields = {"model": f"m{number}", "user": f"u{number}", "metadata": {"k": f"{number}"}}
        http.post("/v1/completions", json=TEXT | fields)
        http.get(f"/nowhere/{number}")
    # One more status, one more reason to refuse, and when each was first seen.
    assert len(samples(http)) <= before + 4


@pytest.mark.slow
def test_without_redis_callers_are_told_and_all_goes_on_when_it_is_back() -> None:
    with Server() as server, GatewayProcess(server.url) as gateway:

        def status(method: str, path: str) -> tuple[int, str | None]:
            answer = httpx.request(method, gateway.url + path, json=TEXT, timeout=120)
            return answer.status_code, answer.json().get("error", {}).get("code")

        with Actor(server.url):
            assert status("POST", "/v1/completions") == (200, None)
        server.stop()
        calls = {
            "/v1/completions": "POST",
            "/v1/jobs": "POST",
            "/health/ready": "GET",
            "/v1/jobs/job_aaaaaa0_aaaaaaaaaaaaaaaaaaaaaaaaaa": "GET",
        }
        with ThreadPoolExecutor(len(calls)) as callers:  # each waits for Redis as long as it may
            told = dict(zip(calls, callers.map(status, calls.values(), calls), strict=True))
        assert told == dict.fromkeys(calls, (503, "queue_unreachable"))
        assert status("GET", "/health/live") == (200, None)
        assert "vllm:" in httpx.get(gateway.url + "/metrics", timeout=120).text
        server.start()
        with Actor(server.url):
            eventually(lambda: status("POST", "/v1/completions") == (200, None), within_s=120)


def settings_of(*words: str) -> GatewaySettings:
    return load_settings(GatewaySettings, "penstock gateway", words)


def test_the_command_line_wins_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("port: 1\nhost: filed\napi_key: [a, b]\nmodel: of-the-worker\n")
    monkeypatch.setenv("PENSTOCK_PORT", "2")
    monkeypatch.setenv("PENSTOCK_DRAIN_S", "7")
    settings = settings_of("--config", str(file), "--drain-s", "9")
    assert (settings.host, settings.port, settings.drain_s) == ("filed", 2, 9)
    assert settings.api_key == ["a", "b"]
    monkeypatch.setenv("PENSTOCK_API_KEY", "c,d")
    assert settings_of(f"--config={file}").api_key == ["c", "d"]


def test_a_wrong_flag_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--port", "99999"])
    assert "--port: " in capfd.readouterr().err


def test_a_worker_of_two_lanes_counts_once() -> None:
    lane = LaneStatus(num_queued=3, num_running=1, num_ended=0, interval_ms=0)
    worker = WorkerStatus(
        worker="w",
        card=WorkerCard(),
        stats={"num_steps": 9, "model": {"generation_tokens": 5}},
        lease_left_ms=9,
    )
    lapsed = worker.model_copy(update={"worker": "gone", "lease_left_ms": -1})
    reports = [LaneReport(MODEL, number, lane, [worker, lapsed]) for number in ("0", "1")]
    text = published(*reports)
    for name in ("vllm:generation_tokens_total", "penstock:engine_steps_total"):
        assert text.count(f'{name}{{engine="w"') == 1
    assert [line for line in text.splitlines() if '"gone"' in line] == [
        f'{names.ENGINE_HEALTHY}{{engine="gone",model_name="{MODEL}"}} 0.0'
    ]
    waiting = [line for line in text.splitlines() if line.startswith(names.REQUESTS_WAITING + "{")]
    assert sum(float(line.split()[-1]) for line in waiting) == 6


@pytest.mark.parametrize(
    "lease_left_ms, unmoved_s, healthy", [(9, 0.4, 1), (9, names.UNHEALTHY_S + 1, 0), (-1, 0.0, 0)]
)
def test_an_engine_is_healthy_while_its_lease_runs_and_it_moves(
    lease_left_ms: int, unmoved_s: float, healthy: float
) -> None:
    lane = LaneStatus(num_queued=0, num_running=1, num_ended=0, interval_ms=0)
    worker = WorkerStatus(
        worker="w",
        card=WorkerCard(),
        stats={"unmoved_s": unmoved_s},
        lease_left_ms=lease_left_ms,
    )
    assert numbers(LaneReport(MODEL, "0", lane, [worker]), names.ENGINE_HEALTHY) == {"w": healthy}


def test_what_waits_is_told_apart_by_what_it_waits_for() -> None:
    lane = LaneStatus(
        num_queued=9,
        num_running=1,
        num_ended=0,
        interval_ms=0,
        num_delayed=2,
        by_reason={"rate": 3},
        num_dead_letters=7,
        totals={"crashed": 5, "buried": 8},
    )
    worker = WorkerStatus(worker="w", card=WorkerCard(), stats={"num_waiting": 6}, lease_left_ms=9)
    name = names.REQUESTS_WAITING_BY_REASON
    alone, served = LaneReport(MODEL, "0", lane, []), LaneReport(MODEL, "0", lane, [worker])
    assert numbers(alone, name) == {"rate": 3, "delayed": 2, "no_worker": 4}
    assert numbers(served, name) == {"rate": 3, "delayed": 2, "capacity": 4, "w": 6}
    for total, count in (("crashed", 5), ("buried", 8), ("lapsed", 0)):
        assert numbers(alone, names.LANE_TOTALS[total][0] + "_total") == {"0": count}
    assert numbers(alone, names.DEAD_LETTERS) == {"0": 7}


def published(*reports: LaneReport) -> str:
    return Metrics().text(Seen(reports), "")[0].decode()


def numbers(report: LaneReport, name: str) -> dict[str, float]:
    """Of one metric, by engine, or by reason or lane where no engine is meant."""
    found = {}
    for line in published(report).splitlines():
        metric, _, rest = line.partition("{")
        if metric == name:
            labels, _, number = rest.partition("} ")
            told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            engine = told.get("engine", "queue:")
            of_queue = told.get("reason", told.get("lane", ""))
            found[of_queue if engine.startswith("queue:") else engine] = float(number)
    return found


@pytest.mark.parametrize(
    "stats, waste",
    [
        ({"num_held_blocks": 4, "block_size": 16, "num_live_slots": 48}, 0.25),
        ({"num_held_blocks": 0, "block_size": 16, "num_live_slots": 0}, 0.0),
        ({}, 0.0),
    ],
)
def test_waste_is_the_share_of_held_slots_without_a_token(
    stats: dict[str, int], waste: float
) -> None:
    lane = LaneStatus(num_queued=0, num_running=1, num_ended=0, interval_ms=0)
    worker = WorkerStatus(worker="w", card=WorkerCard(), stats=dict(stats), lease_left_ms=9)
    text = published(LaneReport(MODEL, "0", lane, [worker]))
    [line] = [line for line in text.splitlines() if line.startswith(names.KV_WASTE)]
    assert float(line.split()[-1]) == waste
