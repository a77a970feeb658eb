"""API keys: made, listed and revoked from the command line, and held against a real gateway."""

import contextlib
import hmac
import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import redis

from api_keys import bearer, issue
from penstock.compose.server import Server
from penstock.gateway.auth import api_key
from penstock.gateway.auth.api_key import API_KEYS, SECRET_MARK, ApiKey, digest_of, is_right
from penstock.gateway.commands.keys import main
from penstock.schemas.process import secret
from stage import MODEL, Actor, GatewayProcess, eventually, spoken

OTHER = "another-secret-" * 4
TEXT = {"model": MODEL, "prompt": "hi"}


def keys(redis_url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.compose.cli", "keys", *words, "--redis-url", redis_url],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module", autouse=True)  # before the gateway starts
def key(actor: Actor) -> str:
    return issue(actor.redis_url, tenant="acme")


def test_a_key_is_made_shown_once_listed_and_revoked_by_the_command(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tenant", "acme", "--scopes", "jobs,metrics", "--expires", "30d", "--name", "CI"]
    made = json.loads(keys(redis_url, "create", "--json", *flags).stdout)
    assert api_key.KEY.fullmatch(made["key"]) and made["state"] == "valid"
    assert (made["tenant"], made["scopes"], made["name"]) == ("acme", ["jobs", "metrics"], "CI")
    assert made["expires_s"] - made["created_s"] == 30 * 86400
    secret_part = made["key"].split("_")[2]
    with redis.Redis.from_url(redis_url) as client:
        kept = client.hgetall(API_KEYS)
    assert secret_part.encode() not in b"".join([*kept.keys(), *kept.values()])
    assert main(["list", "--redis-url", redis_url]) == 0
    listed = capsys.readouterr().out
    assert made["key_id"] in listed and "acme" in listed and secret_part not in listed
    assert main(["revoke", made["key_id"], "--redis-url", redis_url]) == 0
    assert main(["list", "--json", "--redis-url", redis_url]) == 0
    shown = json.loads(capsys.readouterr().out.split("revoked", 1)[1])
    assert shown[0]["state"] == "revoked" and "digest" not in shown[0]


def test_a_new_key_is_a_line_to_copy(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", "--redis-url", redis_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if api_key.KEY.fullmatch(line)]


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("forge",), "usage: "),
        (("create", "--tenant", "a b"), "--tenant: "),
        (("create", "--scopes", "everything"), "--scopes"),
        (("create", "--expires", "soon"), "--expires: "),
        (("revoke", "aaaaaaaaaaaa"), "no key has the id"),
    ],
)
def test_what_is_wrong_with_a_command_is_named(
    redis_url: str, words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main([*words, "--redis-url", redis_url]) != 0
    assert complaint in capsys.readouterr().err
    with redis.Redis.from_url(redis_url) as client:
        assert not client.exists(API_KEYS)


def test_the_secret_is_made_once_and_read_by_its_owner_alone(tmp_path: Path) -> None:
    for number in range(10):
        file = tmp_path / f"deep {number}" / "secret"
        with ThreadPoolExecutor(16) as pool:
            tries = [pool.submit(secret.make_secret, None, file) for _ in range(16)]
            made = {each.result() for each in tries}
        assert len(made) == 1 and len(made.pop()) >= 32
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]
    file.chmod(0o644)
    with pytest.raises(secret.BadSecret, match="chmod 600"):
        secret.read_secret(None, file)
    with pytest.raises(secret.BadSecret, match="32"):
        secret.read_secret("short", file)


def test_a_digest_holds_for_one_key_under_one_secret() -> None:
    one, record = ApiKey.issue(b"s" * 32, {})
    other, _ = ApiKey.issue(b"s" * 32, {})
    assert is_right(b"s" * 32, one, record)
    assert not is_right(b"t" * 32, one, record)
    assert not is_right(b"s" * 32, other, record)
    assert not is_right(b"s" * 32, one, None)
    assert digest_of(b"s" * 32, one) != digest_of(b"s" * 32, other)
    moved = one.replace(record.key_id, "2" * 12)  # the secret alone is not the key
    assert not is_right(b"s" * 32, moved, record)


def test_an_unknown_key_costs_the_work_of_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the bytes that hmac's functions are given, not in time."""
    one, record = ApiKey.issue(b"s" * 32, {})
    other, _ = ApiKey.issue(b"s" * 32, {})
    calls = list[tuple[str, int, int]]()

    def count(name: str) -> None:
        call = getattr(hmac, name)

        def counted(first: bytes, second: bytes, *rest: str) -> object:
            calls.append((name, len(first), len(second)))
            return call(first, second, *rest)

        monkeypatch.setattr(hmac, name, counted)

    count("digest")
    count("compare_digest")

    def work(key: str, record: ApiKey | None) -> list[tuple[str, int, int]]:
        calls.clear()
        is_right(b"s" * 32, key, record)
        return [*calls]

    assert work(one, record) == work(other, record) == work(one, None)
    assert [name for name, *_ in work(one, record)] == ["digest", "compare_digest"]


def test_where_a_key_exists_one_is_demanded_and_none_gets_in_without(
    http: httpx.Client, actor: Actor, key: str
) -> None:
    actor.script = lambda job: spoken("in")
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model=MODEL, prompt="hi").choices[0].text == "in"
    key_id, drawn = key.split("_")[1:]
    wrong = (
        f"psk_{key_id}_{'a' * 52}",
        f"psk_{'a' * 12}_{drawn}",
        key[:-1],
        key + "a",
        key.upper(),
        f"{key} {key}",
        f"psk__{drawn}",
        f"psk_{key_id}_",
        "psk_" + "a" * 8000,
        "none",
    )
    for text in wrong:
        refused = http.post("/v1/completions", json=TEXT, headers=bearer(text))
        assert refused.status_code == 401, text[:80]
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    for header in (key, f"Basic {key}", f"bearer{key}"):
        assert http.get("/v1/models", headers={"authorization": header}).status_code == 401
    assert http.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    assert http.get("/v1/models", headers={"x-api-key": key + "x"}).status_code == 401
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer \xff\xfe",
        "Bearer psk_ключ_секрет".encode(),
        b"Bearer " + b"x" * 30_000,
        b"\x7f" * 20,
        b"Bearer psk_aaaaaaaaaaaa_\x00" + b"a" * 52,
        b"Bearer\r\n psk_folded",
        b"Bearer a\r\nx-penstock-tenant: acme",
    ],
)
def test_hostile_headers_are_refused_and_the_gateway_lives(
    http: httpx.Client, value: bytes
) -> None:
    host, port = http.base_url.host, http.base_url.port
    assert port is not None
    with socket.create_connection((host, port), timeout=20) as link:
        link.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: " + value)
        with contextlib.suppress(OSError):
            link.sendall(b"\r\nconnection: close\r\n\r\n")
        status = int(link.recv(4096).split(b" ")[1])
    assert status in (400, 401)
    assert http.get("/health").status_code == 200


def test_a_key_opens_what_its_scopes_name_and_nothing_else(
    http: httpx.Client, actor: Actor
) -> None:
    actor.script = lambda job: spoken("x")
    opens = {
        "inference": {"/v1/completions", "/v1/chat/completions"},
        "jobs": {"/v1/jobs"},
        "batches": {"/v1/batches", "/v1/files"},
        "metrics": {"/metrics"},
    }
    paths = set.union(*opens.values())
    for scope, opened in [*opens.items(), ("admin", paths)]:
        headers = bearer(issue(actor.redis_url, scopes=(scope,)))
        eventually(lambda headers=headers: http.get("/v1/models", headers=headers).is_success)
        for path in paths:
            answer = http.get(path, headers=headers)
            assert (answer.status_code != 403) == (path in opened), (scope, path)
            if answer.status_code == 403:
                assert answer.json()["error"]["type"] == "permission_error"
                assert answer.headers["x-should-retry"] == "false"


def test_a_revoked_and_an_expired_key_let_nobody_in(http: httpx.Client, actor: Actor) -> None:
    text = issue(actor.redis_url)
    eventually(lambda: http.get("/v1/models", headers=bearer(text)).is_success)
    assert main(["revoke", text.split("_")[1], "--redis-url", actor.redis_url]) == 0
    eventually(lambda: http.get("/v1/models", headers=bearer(text)).status_code == 401)
    expired = issue(actor.redis_url, expires_s=1)
    later = issue(actor.redis_url)  # once it is known, so is the one before
    eventually(lambda: http.get("/v1/models", headers=bearer(later)).is_success)
    assert http.get("/v1/models", headers=bearer(expired)).status_code == 401


def test_the_tenant_is_the_keys_whatever_the_request_says(
    http: httpx.Client, actor: Actor, key: str
) -> None:
    actor.script = lambda job: spoken("mine")
    fields = {"tenant": "default", "user": "default", "metadata": {"tenant": "default"}}
    headers = bearer(key) | {"x-tenant": "default"}
    job_id = http.post("/v1/jobs", json=TEXT | fields, headers=headers).json()["id"]
    eventually(lambda: bool(actor.jobs) and actor.jobs[-1].job_id == job_id)
    assert actor.jobs[-1].tenant == "acme"
    thief = bearer(issue(actor.redis_url, tenant="default", scopes=("admin",)))
    eventually(lambda: http.get("/v1/models", headers=thief).is_success)
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        answer = http.request(method, f"/v1/jobs/{job_id}{path}", headers=thief)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    eventually(
        lambda: http.get(f"/v1/jobs/{job_id}", headers=bearer(key)).json()["state"] == "succeeded"
    )


def test_priority_is_bounded_by_the_key(http: httpx.Client, actor: Actor, key: str) -> None:
    actor.script = lambda job: spoken("x")
    high = issue(actor.redis_url, max_priority="high")
    low = issue(actor.redis_url, max_priority="batch")
    eventually(lambda: http.get("/v1/models", headers=bearer(low)).is_success)
    for text, asked, carried in (
        (key, {"priority_class": "high"}, "normal"),
        (key, {"service_tier": "priority"}, "normal"),
        (key, {"priority_class": "batch"}, "batch"),
        (high, {"priority_class": "high"}, "high"),
        (low, {"priority": -9}, "batch"),
    ):
        body = TEXT | asked
        assert http.post("/v1/completions", json=body, headers=bearer(text)).is_success
        assert actor.jobs[-1].priority_class == carried


def test_without_any_key_all_is_open_and_the_first_key_closes_it_for_good(
    redis_url: str,
) -> None:
    with GatewayProcess(redis_url) as gateway, redis.Redis.from_url(redis_url) as client:

        def status(key: str) -> int:
            return httpx.get(gateway.url + "/version", headers=bearer(key)).status_code

        assert status("none") == 200
        text = issue(redis_url)
        eventually(lambda: status("none") == 401, within_s=30)
        assert status(text) == 200
        assert main(["revoke", text.split("_")[1], "--redis-url", redis_url]) == 0
        eventually(lambda: status(text) == 401, within_s=30)
        assert status("none") == 401
        client.delete(API_KEYS)
        again = issue(redis_url)  # once it is known, so is it that the others are gone
        eventually(lambda: status(again) == 200, within_s=30)
        client.delete(API_KEYS)
        eventually(lambda: status(again) == 401, within_s=30)
        assert status("none") == 401


def test_keys_may_be_demanded_before_there_is_one(redis_url: str) -> None:
    flags = ("--require-api-keys", "--open-metrics", "--api-key", "plain")
    with GatewayProcess(redis_url, *flags) as gateway:

        def status(path: str, key: str) -> int:
            return httpx.get(gateway.url + path, headers=bearer(key)).status_code

        assert status("/version", "none") == 401
        assert status("/version", "plain") == 200
        assert status("/metrics", "none") == 200
        text = issue(redis_url)
        eventually(lambda: status("/version", text) == 200, within_s=30)


@pytest.mark.slow
def test_keys_are_known_while_redis_is_away_for_a_moment() -> None:
    with Server() as server:
        text = issue(server.url)
        with GatewayProcess(server.url) as gateway:
            assert httpx.get(gateway.url + "/version", headers=bearer(text)).is_success
            server.kill()
            for _ in range(3):
                answer = httpx.get(gateway.url + "/version", headers=bearer(text), timeout=30)
                assert answer.is_success
                wrong = httpx.get(gateway.url + "/version", headers=bearer("no"), timeout=30)
                assert wrong.status_code == 401
            with GatewayProcess(server.url) as blind:  # which has never seen what Redis holds
                answer = httpx.get(blind.url + "/version", headers=bearer(text), timeout=30)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    503,
                    "queue_unreachable",
                )
            server.start()
            _, output = gateway.terminate()
    assert text not in output and re.search(r"psk_", output) is None


def test_without_the_server_secret_no_key_lets_in(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER_SECRET", "")
    empty = issue(redis_url)  # one that was made under the empty secret
    monkeypatch.setenv("PENSTOCK_SERVER_SECRET", OTHER)
    texts = [empty, issue(redis_url), "none"]
    monkeypatch.delenv("PENSTOCK_SERVER_SECRET")
    nowhere = ("--server-secret-file", str(tmp_path / "none"))
    with GatewayProcess(redis_url, *nowhere, "--api-key", "word") as gateway:
        for text in texts:
            answer = httpx.get(gateway.url + "/version", headers=bearer(text))
            assert answer.status_code == 401


def test_a_gateway_that_could_let_nobody_in_says_so_and_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER_SECRET", OTHER)
    issue(redis_url)
    monkeypatch.delenv("PENSTOCK_SERVER_SECRET")
    nowhere = ("--server-secret-file", str(tmp_path / "none"))
    with GatewayProcess(redis_url, *nowhere) as gateway:
        assert gateway.process.wait(60) == 3
        assert "API keys exist, but no server secret" in gateway.log.read_text()
    with pytest.raises(AssertionError, match="--require-api-keys lets nobody in"):
        GatewayProcess(redis_url, *nowhere, "--require-api-keys").__enter__()


def test_a_key_is_not_made_under_another_secret_than_the_gateways(
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As by a user of another machine, who would draw a secret of their own."""

    def create(**env: str) -> tuple[int, str]:
        monkeypatch.delenv("PENSTOCK_SERVER_SECRET", raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        status = main(["create", "--redis-url", redis_url])
        return status, capsys.readouterr().err

    with redis.Redis.from_url(redis_url) as client:
        with GatewayProcess(redis_url) as gateway:
            eventually(lambda: client.exists(SECRET_MARK) == 1)
        monkeypatch.setenv("HOME", str(tmp_path))
        status, told = create()
        assert status == 1 and "no server secret is here, and the gateways have one" in told
        assert not (tmp_path / ".penstock").exists()
        status, told = create(PENSTOCK_SERVER_SECRET=OTHER)
        assert status == 1 and "is not that of the gateways" in told
        assert not client.exists(API_KEYS)
        with GatewayProcess(redis_url) as gateway:  # with the other one: the secret was changed
            changed = "server secret is another than that of the last gateway or key"
            eventually(lambda: changed in gateway.log.read_text())
        assert create(PENSTOCK_SERVER_SECRET=OTHER)[0] == 0


def test_a_gateway_says_at_its_start_that_redis_is_away_and_that_everybody_is_let_in() -> None:
    server = Server().start()
    server.kill()
    try:
        with GatewayProcess(server.url, "--host", "0.0.0.0") as gateway:
            said = gateway.log.read_text
            eventually(lambda: "Redis could not be reached: " in said())
            assert "everybody" not in said()
            server.start()
            eventually(lambda: "everybody on whatever reaches 0.0.0.0 is let in" in said())
            assert said().count("could not be reached") == 1 and "Redis is reached" in said()
            [line] = [line for line in said().splitlines() if "everybody" in line]
            assert " ERROR " in line
    finally:
        server.stop()


def test_a_gateway_that_may_wait_answers_its_first_request_once_redis_is_there() -> None:
    """By `retry_s`; another is told at once that keys cannot be checked."""
    server = Server().start()
    try:
        text = issue(server.url)
        server.kill()
        with (
            GatewayProcess(f"{server.url}?retry_s=60") as gateway,
            ThreadPoolExecutor() as threads,
        ):
            asked = threads.submit(
                httpx.get, gateway.url + "/version", headers=bearer(text), timeout=60
            )
            time.sleep(1.5)  # longer than the patience of others
            assert not asked.done()
            server.start()
            assert asked.result().is_success
    finally:
        server.stop()
