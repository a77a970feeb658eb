"""Web pages of elsewhere, which a browser lets ask: while nobody needs a key, they are refused."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from api_keys import bearer
from penstock.gateway.process.listening import ListenSettings
from stage import MODEL, Actor, GatewayProcess

TEXT = {"model": MODEL, "prompt": "hi"}
PATH = "/v1/completions"
EVIL = "evil.example"
READS = ("/v1/models", "/v1/status", "/v1/jobs/x", "/metrics", "/load", "/server_info", "/version")
WRITES = (PATH, "/v1/jobs", "/reset_prefix_cache", "/abort_requests", "/v1/files", "/nowhere")
GATEWAY_FLAGS = (
    *("--allowed-hosts", "App.Example,fd00::5,*.Below.Example"),
    *("--allowed-origins", "https://ours.example"),
)


@pytest.fixture(scope="module")
def wide(actor: Actor) -> Iterator[GatewayProcess]:
    """A gateway that other machines reach."""
    with GatewayProcess(actor.redis_url, "--host", "0.0.0.0") as gateway:
        yield gateway


def code(answer: httpx.Response) -> object:
    return answer.json()["error"]["code"]


def said(gateway: GatewayProcess, head: str) -> tuple[int, bytes]:
    """What a head without a body is answered with."""
    with closing(socket.create_connection(("127.0.0.1", gateway.port), 20)) as link:
        link.sendall(head.replace("\n", "\r\n").encode() + b"\r\n")
        received = b""
        while b"\r\n\r\n" not in received and (piece := link.recv(65536)):
            received += piece
        return int(received.split()[1]), received


def post(gateway: GatewayProcess, path: str = PATH, **headers: str) -> httpx.Response:
    """A POST as a page can make without asking first: text/plain."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{gateway.port}{path}"
    return httpx.post(url, content=json.dumps(TEXT), headers={"content-type": "text/plain"} | named)


@pytest.mark.parametrize("path", READS)
def test_a_page_that_took_the_gateways_address_reads_nothing(
    gateway: GatewayProcess, path: str
) -> None:
    """DNS rebinding: for the browser, page and gateway are of one origin."""
    host = f"{EVIL}:{gateway.port}"
    asked = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    refused = httpx.get(gateway.url + path, headers=asked)
    assert (refused.status_code, code(refused)) == (403, "host_not_allowed")
    assert f"--allowed-hosts {EVIL}" in refused.json()["error"]["message"]


def test_nor_does_it_open_a_websocket_or_run_a_job(gateway: GatewayProcess, actor: Actor) -> None:
    host, before = f"{EVIL}:{gateway.port}", len(actor.jobs)
    refused = post(gateway, host=host, origin=f"http://{host}", sec_fetch_site="same-origin")
    assert (refused.status_code, code(refused)) == (403, "host_not_allowed")
    with (
        closing(socket.create_connection(("127.0.0.1", gateway.port), 20)) as link,
        pytest.raises(InvalidStatus) as told,
    ):
        connect(f"ws://{host}/v1/responses", sock=link, origin=f"http://{host}")  # type: ignore[arg-type]
    assert told.value.response.status_code == 403
    assert b"host_not_allowed" in (told.value.response.body or b"")
    assert len(actor.jobs) == before


@pytest.mark.parametrize("path", WRITES)
@pytest.mark.parametrize(
    "page",
    [
        {"origin": f"https://{EVIL}"},
        {"origin": "null"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"origin": f"https://{EVIL}", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "https://127.0.0.1"},
    ],
)
def test_a_page_of_another_site_changes_nothing(
    gateway: GatewayProcess, actor: Actor, path: str, page: Mapping[str, str]
) -> None:
    before = len(actor.jobs)
    refused = post(gateway, path, **page)
    assert (refused.status_code, code(refused)) == (403, "page_not_allowed")
    assert "--allowed-origins" in refused.json()["error"]["message"]
    assert len(actor.jobs) == before


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:{port}",
        "localhost.",
        "127.0.0.1:{port}",
        "127.9.9.9",
        "[::1]:{port}",
        "[::ffff:127.0.0.1]",
        "app.example",
        "APP.example.:1",
        "[fd00::5]:80",
        "x.below.example:8000",
        "y.x.below.example",
    ],
)
def test_names_of_this_machine_and_listed_ones_are_served(
    gateway: GatewayProcess, host: str
) -> None:
    name = host.format(port=gateway.port)
    own = post(gateway, host=name, origin=f"http://{name}", sec_fetch_site="same-origin")
    plain = post(gateway, host=name)
    assert (own.status_code, plain.status_code) == (200, 200), own.text
    assert post(gateway, host=name, origin="https://ours.example").is_success


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example#localhost",
        "x.app.example",
        "below.example",
        "xbelow.example",
        "x.below.example.evil.example",
        "192.168.1.4",
        "0.0.0.0",
        "localhost..",
        "127.1",
        "2130706433",
    ],
)
def test_what_only_looks_like_them_is_not(gateway: GatewayProcess, host: str) -> None:
    assert httpx.get(gateway.url + "/v1/models", headers={"host": host}).status_code in (400, 403)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/queue", "/ping", "/"])
def test_health_and_the_page_are_served_under_any_name(gateway: GatewayProcess, path: str) -> None:
    assert httpx.get(gateway.url + path, headers={"host": "10.1.2.3:8000"}).is_success


def test_beyond_loopback_addresses_are_served_and_names_are_not(wide: GatewayProcess) -> None:
    for host in ("10.1.2.3:8000", "[2001:db8::1]", "0.0.0.0:8000", "localhost"):
        assert post(wide, host=host, origin=f"http://{host}").is_success
    assert code(post(wide, host="box")) == "host_not_allowed"
    assert code(post(wide, host="10.1.2.3", origin="http://10.1.2.4")) == "page_not_allowed"


def test_a_server_may_be_asked_under_its_hosts_name_or_under_any(actor: Actor) -> None:
    name = socket.gethostname()
    for flags in (("--host", name), ("--allowed-hosts", "*")):
        with GatewayProcess(actor.redis_url, *flags) as gateway:
            answer = httpx.get(f"{gateway.url}/v1/models", headers={"host": name})
            assert answer.is_success, answer.text


def test_no_browser_reaches_a_unix_socket(actor: Actor, tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    with (
        GatewayProcess(actor.redis_url, "--uds", str(path)),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any") as http,
    ):
        assert http.get("/v1/models").is_success
        refused = http.post(PATH, json=TEXT, headers={"origin": f"https://{EVIL}"})
        assert code(refused) == "page_not_allowed"  # a proxy passes it on


def test_who_has_a_key_asks_under_any_name(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url, "--api-key", "word") as listed:
        answer = post(listed, host=EVIL, origin=f"https://{EVIL}", **bearer("word"))
        assert answer.is_success, answer.text
        assert code(post(listed, host=EVIL)) == "invalid_api_key"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/models HTTP/1.1\n", 400),
        ("GET /v1/models HTTP/1.1\nHost:\n", 400),
        ("GET /v1/models HTTP/1.1\nHost: localhost\nHost: localhost\n", 400),
        ("GET /v1/models HTTP/1.1\nHost: localhost\nHost: evil.example\n", 400),
        ("GET /v1/models HTTP/1.0\nHost: localhost\nHost: localhost\n", 400),
        ("GET /v1/models HTTP/1.1\nHost: me@localhost\n", 400),
        ("GET /v1/models HTTP/1.1\nHost: localhost, evil.example\n", 400),
        ("GET /v1/models HTTP/1.0\n", 200),
        ("GET /v1/models HTTP/1.0\nHost: evil.example\n", 403),
        ("GET http://localhost/v1/models HTTP/1.1\nHost: localhost\n", 200),
        ("GET http://localhost/v1/models HTTP/1.1\nHost: evil.example\n", 200),
        ("GET http://evil.example/v1/models HTTP/1.1\nHost: localhost\n", 403),
        ("GET http://me@localhost/v1/models HTTP/1.1\nHost: localhost\n", 400),
        ("GET http://localhost/v1/models HTTP/1.1\n", 400),
    ],
)
def test_a_request_has_one_host(gateway: GatewayProcess, head: str, status: int) -> None:
    answer = said(gateway, head)
    assert answer[0] == status, answer[1]


def test_a_websocket_has_one_host_too(gateway: GatewayProcess) -> None:
    upgrade = "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\n"
    begin = "GET /v1/responses HTTP/1.1\n"
    assert said(gateway, f"{begin}Host: localhost\n{upgrade}{key}")[0] == 101
    for hosts in ("", "Host: localhost\nHost: localhost\n"):
        assert said(gateway, f"{begin}{hosts}{upgrade}{key}")[0] == 400


@pytest.mark.parametrize(
    "host", ["app:8000", "http://app", "a/b", "::1:x", "app[0]", "me@app", "a.*", "**", "*a"]
)
def test_what_is_no_host_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ValidationError, match="is no host"):
        ListenSettings.model_validate({"allowed_hosts": host})
