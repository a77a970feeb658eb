"""Settings that change while the gateway serves: its file is read again on SIGHUP."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api_keys import bearer
from stage import MODEL, Actor, GatewayProcess, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}
AGAIN = "settings were read again"
STAY = "settings stay as they were: "


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_text("api_key: [first]\nlog_level: info\n")
    return file


@pytest.fixture
def file_gateway(
    actor: Actor, file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GatewayProcess]:
    """One without a server secret, so that only the file's keys let in."""
    monkeypatch.delenv("PENSTOCK_SERVER_SECRET")
    flags = ["--config", str(file), "--server-secret-file", str(file.with_name("none"))]
    with GatewayProcess(actor.redis_url, *flags) as gateway:
        assert httpx.get(gateway.url + "/health/live").is_success  # it serves, and hears SIGHUP
        yield gateway


def reload(gateway: GatewayProcess, file: Path, text: str, until: str) -> str:
    """What the gateway logged of the file, once it logged `until`."""
    began = len(gateway.log.read_text())
    file.write_text(text)
    gateway.process.send_signal(signal.SIGHUP)
    eventually(lambda: until in gateway.log.read_text()[began:], within_s=20)
    return gateway.log.read_text()[began:]


def status(gateway: GatewayProcess, key: str, text: str = "hi") -> int:
    """Of a job in the background, under a key."""
    body, headers = TEXT | {"prompt": text}, bearer(key)
    return httpx.post(gateway.url + "/v1/jobs", json=body, headers=headers).status_code


def test_what_can_change_does_so_under_traffic_and_no_request_fails(
    file_gateway: GatewayProcess, actor: Actor, file: Path
) -> None:
    actor.script = lambda job: spoken("Hello", " world")
    stopping, statuses = threading.Event(), list[int]()

    def ask() -> None:
        with httpx.Client(base_url=file_gateway.url, headers=bearer("stays"), timeout=60) as http:
            while not stopping.is_set():
                answer = http.post("/v1/completions", json=TEXT | {"stream": True})
                whole = answer.is_success and answer.text.endswith("data: [DONE]\n\n")
                statuses.append(answer.status_code if whole else 0)

    reload(file_gateway, file, "api_key: [stays, first]\n", AGAIN)
    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for number in range(10):
        had = len(statuses)
        reload(file_gateway, file, f"api_key: [stays, key{number}]\nlog_level: debug\n", AGAIN)
        eventually(lambda had=had: len(statuses) > had)
    stopping.set()
    for caller in callers:
        caller.join()
    assert set(statuses) == {200}
    assert [status(file_gateway, key) for key in ("stays", "key9", "key8", "first")] == [
        *(202, 202),
        *(401, 401),
    ]


def test_a_reload_names_what_changed_and_what_needs_a_restart(
    file_gateway: GatewayProcess, file: Path
) -> None:
    text = "api_key: [second]\nmax_body_bytes: 200\nmax_connections: 7\nport: 1\n"
    logged = reload(file_gateway, file, text + "num_lanes: 2\n", AGAIN)
    for line in (
        "api_key was",
        "max_body_bytes was",
        "max_connections needs a restart and was not",
    ):
        assert f"{line} changed" in logged
    assert not any(word in logged for word in ("second", "port", "redis_url", "num_lanes"))
    assert status(file_gateway, "second", "x" * 300) == 413
    reload(file_gateway, file, text + "log_level: warning\n", "max_connections needs a restart")
    logged = reload(file_gateway, file, text + "log_format: json\n", AGAIN)
    assert '"message": "log_format was changed"' in logged and "max_body_bytes" not in logged
    assert file_gateway.log.read_text().count(AGAIN) == 2  # nothing of this kind under `warning`


def test_a_lane_may_hold_as_many_jobs_as_the_file_says_now(
    file_gateway: GatewayProcess, file: Path
) -> None:
    def asked() -> int:
        body = TEXT | {"delay_ms": 3_600_000}
        answer = httpx.post(file_gateway.url + "/v1/jobs", json=body, headers=bearer("first"))
        return answer.status_code

    assert asked() == 202
    reload(file_gateway, file, "api_key: [first]\nmax_num_queued_reqs: 1\n", AGAIN)
    assert asked() == 429
    reload(file_gateway, file, "api_key: [first]\nmax_num_queued_reqs: 2\n", AGAIN)
    assert [asked(), asked()] == [202, 429]


@pytest.mark.parametrize(
    "text, why",
    [
        ("api_key: [second", "--config: {file} is not YAML"),
        (
            "max_num_queued_reqs: 0\napi_key: [second]",
            "{file}: max_num_queued_reqs: Input should be",
        ),
        ("api_keys: [second]", "--config: {file}: api_keys is no setting: did you mean api_key?"),
        ("", "--api-key: without any nobody is let in"),
    ],
)
def test_wrong_settings_change_nothing_and_the_log_says_why(
    file_gateway: GatewayProcess, file: Path, text: str, why: str
) -> None:
    logged = reload(file_gateway, file, text, STAY)
    assert "ERROR " + STAY + why.format(file=file) in logged and AGAIN not in logged
    assert [status(file_gateway, "first"), status(file_gateway, "second")] == [202, 401]


def test_a_file_that_lost_its_last_key_opens_the_door_to_nobody(actor: Actor, file: Path) -> None:
    """The server secret is there, so that keys in Redis could let in."""
    with GatewayProcess(actor.redis_url, "--config", str(file)) as gateway:
        assert [status(gateway, "first"), status(gateway, "none")] == [202, 401]
        assert "api_key was changed" in reload(gateway, file, "", AGAIN)
        assert [status(gateway, "first"), status(gateway, "none")] == [401, 401]
        ended, _ = gateway.terminate()
        assert ended == 0
