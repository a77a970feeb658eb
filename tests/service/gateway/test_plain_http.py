"""What HTTP servers have besides their API: CORS, gzip, HEAD, TLS, Unix sockets, a root path."""

import gzip
import json
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
import trustme

from api_keys import bearer, issue
from penstock.compose.server import Server
from penstock.gateway.auth.access import OPEN_PATHS
from penstock.gateway.described.description import description_of
from penstock.gateway.described.table import ROUTES
from penstock.gateway.process.listening import CannotListen, ListenSettings, listen, tls_of
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server.app import build
from penstock.schemas.process.exit_status import NEVER_STARTS
from stage import MODEL, Actor, GatewayProcess, Wait, eventually, spoken

TEXT = {"model": MODEL, "prompt": "hi"}
PAGE = "https://app.example"
PATH = "/v1/completions"
GZIPPED = {"content-encoding": "gzip", "content-type": "application/json"}
GATEWAY_FLAGS = ("--allowed-origins", PAGE, "--root-path", "/llm", "--api-key", "word")


@pytest.fixture
def caller(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, headers=bearer("word"), timeout=60) as http:
        yield http


def test_a_browser_asks_without_a_key_and_is_told_what_it_may_send(gateway: GatewayProcess) -> None:
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, idempotency-key",
    }
    answer = httpx.options(gateway.url + PATH, headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    allowed = answer.headers["access-control-allow-headers"]
    assert {"authorization", "content-type", "idempotency-key"} <= set(allowed.split(", "))
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize("path", [PATH, "/nowhere"])
def test_a_page_reads_answers_errors_and_headers(caller: httpx.Client, path: str) -> None:
    answer = caller.post(path, json=TEXT, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-expose-headers"] == "*"


def test_other_pages_read_nothing(caller: httpx.Client) -> None:
    answer = caller.post(PATH, json=TEXT, headers={"origin": "https://other.example"})
    assert answer.is_success
    assert "access-control-allow-origin" not in answer.headers


def test_no_page_asks_anything_unless_an_origin_is_named(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url) as gateway:
        answer = httpx.post(gateway.url + PATH, json=TEXT, headers={"origin": PAGE})
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("num_members", [1, 3])
def test_a_body_may_come_by_gzip(caller: httpx.Client, num_members: int) -> None:
    text = json.dumps(TEXT).encode()
    step = -(-len(text) // num_members)
    body = b"".join(gzip.compress(text[at : at + step]) for at in range(0, len(text), step))
    answer = caller.post(PATH, content=body, headers=GZIPPED)
    assert answer.json()["choices"][0]["text"] == "Hello world"


def test_what_unpacks_to_too_much_is_413(caller: httpx.Client) -> None:
    body = gzip.compress(json.dumps(TEXT | {"prompt": "a" * 5_000_000}).encode())
    assert len(body) < 100_000
    assert caller.post(PATH, content=body, headers=GZIPPED).status_code == 413


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, -8), slice(0, 5), slice(1, None)])
def test_a_body_that_is_no_whole_gzip_is_400(caller: httpx.Client, cut: slice) -> None:
    body = gzip.compress(json.dumps(TEXT).encode())[cut]
    answer = caller.post(PATH, content=body, headers=GZIPPED)
    assert answer.status_code == 400
    assert "gzip" in answer.json()["error"]["message"]


def test_each_path_that_is_got_has_a_head(caller: httpx.Client) -> None:
    for path in sorted(OPEN_PATHS | {"/v1/models", f"/v1/models/{MODEL}", "/version", "/nowhere"}):
        whole, head = caller.get(path), caller.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert caller.head(PATH).status_code == 405


def test_the_head_of_a_stream_that_goes_on_comes_and_ends(actor: Actor) -> None:
    wait = Wait()
    actor.script = lambda job: [*spoken("Hello"), wait, *spoken(" world")]
    try:
        with (
            GatewayProcess(actor.redis_url, "--drain-s", "1") as gateway,
            httpx.Client(base_url=gateway.url, timeout=20) as http,
        ):
            job_id = http.post("/v1/jobs", json=TEXT).json()["id"]
            for path in (f"/v1/jobs/{job_id}/events", "/v1/status/events"):
                head = http.head(path)
                assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert http.get("/version").is_success  # on the connection that had the heads
            status, log = gateway.terminate()
            assert status == 0
            assert "running task" not in log  # that had to be cancelled
    finally:
        wait.set()
        actor.script = lambda job: spoken("Hello", " world")


def test_a_root_path_may_be_there_or_not(gateway: GatewayProcess, caller: httpx.Client) -> None:
    for path in (PATH, "/llm" + PATH):
        assert caller.post(path, json=TEXT).is_success
    for path in ("/", "/llm", "/llm/", "/llm/docs", "/llm/page/page.js"):
        assert caller.get(path).is_success, path
    assert caller.get("/llmx/version").status_code == 404
    assert caller.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    job_id = caller.post("/llm/v1/jobs", json=TEXT).json()["id"]
    url = caller.post(f"/llm/v1/jobs/{job_id}/share").json()["url"]
    assert url.startswith("/llm/v1/jobs/")
    assert httpx.get(gateway.url + url).is_success


def test_a_root_path_hides_no_scope() -> None:
    with Server() as server, GatewayProcess(server.url, "--root-path", "/llm") as gateway:
        key = bearer(issue(server.url, scopes=["metrics"]))
        for path in ("/v1/jobs", "/llm/v1/jobs", "/%6clm/v1/jobs", "/llm/v1%2fjobs"):
            url = gateway.url + path
            assert httpx.get(url, headers=key).status_code == 403, path
            assert httpx.get(url, headers=bearer("no key")).status_code == 401, path


def test_openapi_resolves_and_tells_of_each_route(caller: httpx.Client) -> None:
    told = caller.get("/openapi.json").json()
    shapes = told["components"]["schemas"]

    def resolve(value: object) -> None:
        for each in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            if isinstance(each, dict | list):
                resolve(each)
        if isinstance(value, dict) and isinstance(ref := value.get("$ref"), str):
            head, _, name = ref.rpartition("/")
            assert (head, name in shapes) == ("#/components/schemas", True), ref

    resolve(told)
    listed = {
        f"{method.upper()} {path}" for path, methods in told["paths"].items() for method in methods
    }
    assert listed == ROUTES.keys() - {"GET /tokenizer_info"}
    for shape in shapes.values():
        jsonschema.Draft202012Validator.check_schema(shape)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/jobs", "GET, POST, HEAD"),
        ("/v1/jobs/1", "DELETE, GET, HEAD"),
        ("/v1/responses/input_tokens", "POST"),
        ("/llm/v1/files/file-1", "DELETE, GET, HEAD"),
    ],
)
def test_a_method_that_is_not_there_is_told_all_that_are(
    caller: httpx.Client, path: str, allowed: str
) -> None:
    answer = caller.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_the_description_may_be_made_twice_at_once() -> None:
    app = build(GatewaySettings(redis_url="redis://127.0.0.1:1/0"))
    assert description_of(app, "/llm") == description_of(app, "/llm")


def test_the_docs_need_nothing_from_elsewhere(caller: httpx.Client) -> None:
    page = caller.get("/docs")
    assert "://" not in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert len(caller.get("/docs/swagger-ui-bundle.js").content) > 1_000_000


def test_the_docs_can_be_left_out(actor: Actor) -> None:
    with GatewayProcess(actor.redis_url, "--disable-fastapi-docs") as gateway:
        for path in ("/docs", "/openapi.json", "/docs/docs.js"):
            assert httpx.get(gateway.url + path).status_code == 404


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(authority: trustme.CA, folder: Path) -> list[str]:
    """Write a certificate and its key; return the flags that name them."""
    made = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    made.private_key_pem.write_to_path(key)
    return ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]


def serial(gateway: GatewayProcess, authority: trustme.CA) -> str:
    """The number of the certificate that a new connection is shown, and trusts."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with (
        socket.create_connection(("127.0.0.1", gateway.port), 20) as plain,
        trusting.wrap_socket(plain, server_hostname="localhost") as shown,
    ):
        certificate = shown.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_tls_serves_whole_answers_and_streams(
    actor: Actor, authority: trustme.CA, tmp_path: Path
) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with (
        GatewayProcess(actor.redis_url, *written(authority, tmp_path)) as gateway,
        httpx.Client(verify=trusting, base_url=gateway.url, timeout=60) as http,
    ):
        assert gateway.url.startswith("https://")
        assert http.post(PATH, json=TEXT).json()["choices"][0]["text"] == "Hello world"
        assert http.post(PATH, json=TEXT | {"stream": True}).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(gateway.url.replace("https", "http") + "/health")


def test_a_renewed_certificate_is_shown_after_sighup(
    actor: Actor, authority: trustme.CA, tmp_path: Path
) -> None:
    flags = written(authority, tmp_path)
    with GatewayProcess(actor.redis_url, *flags) as gateway:
        first = serial(gateway, authority)
        assert serial(gateway, authority) == first
        key = tmp_path.joinpath("server.key").read_bytes()
        written(authority, tmp_path)
        renewed = tmp_path.joinpath("server.key").read_bytes()
        tmp_path.joinpath("server.key").write_bytes(key)  # that of another certificate
        gateway.process.send_signal(signal.SIGHUP)
        eventually(
            lambda: "the certificate stays as it was: --ssl-certfile" in gateway.log.read_text()
        )
        assert serial(gateway, authority) == first
        tmp_path.joinpath("server.key").write_bytes(renewed)
        gateway.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the certificate was read again" in gateway.log.read_text())
        assert serial(gateway, authority) != first


def test_callers_show_a_certificate_where_one_is_asked_for(
    actor: Actor, authority: trustme.CA, tmp_path: Path
) -> None:
    callers = trustme.CA()
    callers.cert_pem.write_to_path(tmp_path / "callers.pem")
    flags = [*written(authority, tmp_path), "--ssl-ca-certs", str(tmp_path / "callers.pem")]
    with GatewayProcess(actor.redis_url, *flags) as gateway:
        for issuer in (None, authority, callers):
            trusting = ssl.create_default_context()
            authority.configure_trust(trusting)
            if issuer is not None:
                issuer.issue_cert("caller@example.com").configure_cert(trusting)
            with httpx.Client(verify=trusting) as http:
                if issuer is callers:
                    assert http.get(gateway.url + "/health").is_success
                    continue
                with pytest.raises(httpx.HTTPError):
                    http.get(gateway.url + "/health")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ssl-certfile", "{}/none.pem"], "--ssl-certfile: No such file or directory"),
        (["--ssl-certfile", "{}/text.pem"], "--ssl-certfile: "),
        (["--ssl-keyfile", "{}/text.pem"], "--ssl-keyfile: has no effect without --ssl-certfile"),
        (["--ssl-ca-certs", "{}/text.pem"], "--ssl-ca-certs: has no effect without"),
        (["--uds", "{}/none/at.sock"], "--uds: cannot listen on"),
        (["--uds", "{}/text.pem"], "--uds: cannot listen on"),
        (["--uds", "{}/" + "a" * 120], "--uds: cannot listen on"),
    ],
)
def test_what_cannot_serve_is_refused_by_name(tmp_path: Path, flags: list[str], told: str) -> None:
    (tmp_path / "text.pem").write_text("no PEM")
    name, path = flags[0].removeprefix("--").replace("-", "_"), flags[1].format(tmp_path)
    settings = ListenSettings.model_validate({name: path})
    with pytest.raises(CannotListen, match=re.escape(told)):
        tls_of(settings)
        listen(settings)
    assert (tmp_path / "text.pem").read_text() == "no PEM"


def test_a_gateway_that_cannot_serve_ends_with_a_line(actor: Actor, tmp_path: Path) -> None:
    gateway = GatewayProcess(actor.redis_url, "--ssl-certfile", str(tmp_path / "none.pem"))
    assert gateway.process.wait(30) == NEVER_STARTS
    told = "penstock gateway: --ssl-certfile: No such file or directory"
    assert told in gateway.log.read_text()
    gateway.log.unlink()


def test_a_unix_socket_serves_and_is_gone_at_the_end(actor: Actor, tmp_path: Path) -> None:
    path = tmp_path / "penstock.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # its file stays, and nobody listens
        dead.bind(str(path))
    with GatewayProcess(actor.redis_url, "--uds", str(path)) as gateway:
        link = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=link, base_url="http://penstock", timeout=60) as http:
            assert http.post(PATH, json=TEXT).json()["choices"][0]["text"] == "Hello world"
        second = GatewayProcess(actor.redis_url, "--uds", str(path))
        assert second.process.wait(30) != 0
        assert "another process does" in second.log.read_text()
        second.log.unlink()
        assert gateway.terminate()[0] == 0
    assert not path.exists()
