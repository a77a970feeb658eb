"""What callers send stays in their jobs, and tenants do not feel each other's caches."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import redis

from api_keys import issue
from penstock.compose.server import Server
from penstock.kernels.cpu.compile import build
from penstock.worker.bundled.paths import BUNDLED_MODEL
from penstock.worker.process.settings import WorkerSettings
from stage import LISTENS, eventually

CANARY = "xyzzy9canary"
SALT_SECRET = "salt-of-these-tests-9canary"
MODEL, FAKE = "penstock", "fake"
PROMPT = "The gates of the dam are opened at dawn, and water falls through the penstock. " * 8
DEBUG = ["--log-level", "debug"]
Body = dict[str, object]


class Process:
    """One of ours, with all that it and its children say in a file, and a home of its own."""

    def __init__(self, folder: Path, module: str, *argv: str) -> None:
        self.output = folder / f"{module}-{len(list(folder.glob('*.out')))}.out"
        places = {name: str(folder) for name in ("TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *argv, *DEBUG],
                env=os.environ | places | {"PENSTOCK_CACHE_SALT_SECRET": SALT_SECRET},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Service(NamedTuple):
    url: str
    redis_url: str
    keys: dict[str, str]  # by tenant
    folder: Path

    def post(self, path: str, body: Body | bytes, tenant: str = "ten") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {
            "authorization": f"Bearer {self.keys[tenant]}",
            "x-request-id": CANARY,
            "idempotency-key": f"{CANARY}{len(content)}",
        }
        del headers["idempotency-key" if path != "/v1/jobs" else "x-request-id"]
        return httpx.post(self.url + path, content=content, headers=headers, timeout=200)

    def num_cached(self, tenant: str, **fields: object) -> int:
        """How many of the prompt's tokens were found in the cache."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **fields}
        usage = self.post("/v1/completions", body, tenant).json()["usage"]
        assert usage["prompt_tokens"] > 64
        cached: int = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return cached


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    compiled = build(("-O3", "-march=native"))  # as its workers would by themselves, in a while
    (folder / "penstock").mkdir(0o700)
    for file in (compiled, compiled.with_suffix(".sum")):
        shutil.copy(file, folder / "penstock")
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        at = ["--redis-url", server.url]
        keys = {name: issue(server.url, tenant=name) for name in ("ten", "tenant")}
        gateway = stack.enter_context(
            Process(folder, "penstock.gateway.server.cli", "--port", "0", *at)
        )
        eventually(lambda: LISTENS.search(gateway.output.read_text()) is not None)
        listens = LISTENS.search(gateway.output.read_text())
        assert listens is not None
        real = ["--model", str(BUNDLED_MODEL), "--served-model-name", MODEL]
        fake = ["--model", FAKE, "--load-format", "fake", "--fake-poison", "poison"]
        stack.enter_context(Process(folder, "penstock.gateway.housekeeping.main", *at))
        for flags in (real, fake):
            own = ["--lease-ttl-ms", "1500", "--crash-dump-folder", str(folder / "crashes")]
            stack.enter_context(
                Process(folder, "penstock.worker.supervisor.cli", *flags, *own, *at)
            )
        made = Service(listens[0], server.url, keys, folder)

        def serves() -> bool:
            try:
                headers = {"authorization": f"Bearer {keys['ten']}"}
                models = httpx.get(f"{made.url}/v1/models", headers=headers, timeout=20).json()
            except (httpx.TransportError, ValueError):
                return False
            said = [
                path.read_text() for path in folder.glob("penstock.worker.supervisor.cli-*.out")
            ]
            are_at_work = all(
                "started serving" in text for text in said
            )  # a model comes a bit sooner
            return are_at_work and {each["id"] for each in models.get("data", [])} == {MODEL, FAKE}

        eventually(serves, within_s=100)
        yield made


@pytest.mark.slow
def test_a_cached_prefix_is_felt_by_its_own_tenant_alone(service: Service) -> None:
    assert service.num_cached("tenant") == 0
    assert service.num_cached("tenant") > 0
    assert service.num_cached("ten") == 0  # another's blocks
    assert service.num_cached("ten") > 0
    assert service.num_cached("tenant", cache_salt="s") == 0  # mixed in
    assert service.num_cached("tenant", cache_salt="s") > 0
    assert service.num_cached("ten", cache_salt="s") == 0  # and never alone
    assert service.num_cached("ten", cache_salt="ant") == 0  # "ten" + "ant" is not "tenant"
    assert service.num_cached("ten", cache_salt="t") == 0
    assert service.num_cached("tenant", cache_salt="ants") == 0


def test_the_salts_secret_is_drawn_if_none_is_given_and_never_shown() -> None:
    first, second = (WorkerSettings(model="m") for _ in range(2))
    assert first.cache_salt("a", None) != second.cache_salt("a", None)
    given = [WorkerSettings(model="m", cache_salt_secret=SALT_SECRET) for _ in range(2)]
    assert given[0].cache_salt("a", None) == given[1].cache_salt("a", None)
    assert len(first.cache_salt_secret) == 64 and SALT_SECRET not in repr(given[0])
    with pytest.raises(ValueError):
        WorkerSettings(model="m", cache_salt_secret="short")


SCHEMA = {"type": "object", "properties": {CANARY: {"const": CANARY}}, "required": [CANARY]}
USER = [{"role": "user", "content": f"Say {CANARY}"}]
TOOL = {"type": "function", "function": {"name": CANARY, "description": CANARY}}
CHAT: Body = {"model": MODEL, "messages": USER, "max_tokens": 8, "user": CANARY}
TEXT: Body = {"model": MODEL, "prompt": f"{CANARY} " * 3, "max_tokens": 8}
ENOUGH = 200
ASKED: list[tuple[str, Body | bytes, set[int]]] = [
    ("/v1/chat/completions", CHAT, {200}),
    ("/v1/chat/completions", CHAT | {"stream": True}, {200}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, {200}),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {CANARY: [CANARY]}}, {200}),
    ("/v1/completions", TEXT | {"stop": [CANARY], "cache_salt": CANARY, "echo": True}, {200}),
    ("/v1/completions", TEXT | {"guided_json": SCHEMA, "max_tokens": ENOUGH}, {200}),
    ("/v1/completions", TEXT | {"guided_choice": [CANARY], "max_tokens": ENOUGH}, {200}),
    ("/v1/completions", TEXT | {"guided_regex": f"{CANARY}("}, {400}),
    ("/v1/completions", TEXT | {"guided_regex": f"{CANARY}" + "[" * 60_000}, {400}),
    ("/v1/completions", TEXT | {"guided_json": {"type": CANARY}}, {400}),
    ("/v1/completions", TEXT | {"guided_grammar": f"start: {CANARY}"}, {400}),
    ("/v1/completions", TEXT | {"prompt": CANARY * 9000}, {400}),
    ("/v1/completions", TEXT | {"model": CANARY}, {404}),
    ("/v1/completions", TEXT | {"temperature": CANARY}, {400}),
    ("/v1/completions", TEXT | {"metadata": {CANARY: CANARY * 99}}, {400}),
    ("/v1/completions", b'{"model": "' + CANARY.encode(), {400}),
    ("/v1/completions", TEXT | {"model": FAKE}, {200}),
    (f"/v1/{CANARY}?key={CANARY}", TEXT, {404}),
    (f"/v1/jobs/{CANARY}/cancel", TEXT, {404}),
    ("/v1/jobs", TEXT | {"metadata": {CANARY: CANARY}}, {200, 202}),
    ("/v1/jobs", TEXT | {"model": FAKE, "prompt": f"poison:crash:0 {CANARY}"}, {200, 202}),
    ("/v1/jobs", CHAT | {"metadata": {"a": CANARY}, "timeout_ms": 1}, {200, 202, 504}),
    ("/v1/jobs", CHAT | {"messages": USER * 2049}, {400}),
]


OWN = (b"request", b"log", b"result")  # keys of a job that hold what was asked and answered


def held(url: str, besides: tuple[bytes, ...] = OWN) -> Iterator[bytes]:
    """Every byte in Redis, of all databases, but for the keys that end so."""
    for number in range(2):
        with redis.Redis.from_url(url, db=number) as client:
            for key in client.scan_iter(count=1000):
                yield key
                if key.rpartition(b":")[2] in besides:
                    continue
                kind = client.type(key)
                if kind == b"string":
                    yield client.get(key) or b""
                elif kind == b"hash":
                    fields = client.hgetall(key)
                    if besides:  # a job's metadata is its caller's too
                        fields.pop(b"metadata", None)
                    yield repr(fields).encode()
                elif kind == b"list":
                    yield repr(client.lrange(key, 0, -1)).encode()
                elif kind == b"set":
                    yield repr(client.smembers(key)).encode()
                elif kind == b"zset":
                    yield repr(client.zrange(key, 0, -1)).encode()
                else:
                    assert kind in (b"stream", b"none"), kind
                    yield repr(client.xrange(key)).encode() if kind == b"stream" else b""


def written(service: Service) -> dict[str, bytes]:
    """All that was said and left anywhere, by where."""
    files = [path for path in service.folder.rglob("*") if path.is_file()]
    found = {str(path): path.read_bytes() for path in files}
    headers = {"authorization": f"Bearer {service.keys['ten']}"}
    for path in ("/metrics", "/health", "/openapi.json"):
        found[path] = httpx.get(service.url + path, headers=headers, timeout=60).content
    found["Redis"] = b"\n".join(held(service.redis_url))
    return found


@pytest.mark.slow
def test_a_canary_is_found_nowhere_but_in_its_job(service: Service) -> None:
    ids = []
    for path, body, statuses in ASKED:
        response = service.post(path, body)
        assert response.status_code in statuses, (path, body, response.text)
        if response.is_success and path == "/v1/jobs":
            ids.append(response.json()["id"])
    headers = {"authorization": f"Bearer {service.keys['ten']}"}

    def state(job_id: str) -> str:
        answer = httpx.get(f"{service.url}/v1/jobs/{job_id}", headers=headers, timeout=60)
        return str(answer.json().get("state") or answer.json().get("status"))

    ended = {"succeeded", "failed", "cancelled", "expired", "dead", "completed"}
    eventually(lambda: {state(job_id) for job_id in ids} <= ended, within_s=100)
    assert "dead" in {state(job_id) for job_id in ids}
    assert CANARY.encode() in b"".join(held(service.redis_url, besides=()))  # it looks everywhere
    # And what it looks at. A crash is told to the queue first, then to the disk.
    eventually(lambda: len(list(service.folder.rglob("*.crash.json"))) >= 3, within_s=30)
    for place, text in written(service).items():
        assert b"Traceback" not in text, place
        for secret in (CANARY, SALT_SECRET, os.environ["PENSTOCK_SERVER_SECRET"]):
            assert secret.encode() not in text, (place, _around(text, secret.encode()))
        for key in service.keys.values():
            assert key.rpartition("_")[2].encode() not in text, place


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_error_is_logged_by_its_place_and_not_by_what_it_says(form: str) -> None:
    code = """if True:
        import asyncio, logging, threading
        from penstock.schemas.process.start import Settings, write_log_to_stderr
        settings = Settings(log_level="debug", log_format="{FORM}")
        write_log_to_stderr("part", settings, logging.getLogger("penstock.part"))
        def fail():
            try:
                raise KeyError("{CANARY}")
            except KeyError as error:
                raise ExceptionGroup("{CANARY}", [ValueError("{CANARY}")]) from error
        def logged(name):
            try:
                fail()
            except ExceptionGroup:
                logging.getLogger(name).exception("it failed")
        logged("penstock.part"), logged("another")
        async def forgotten():
            asyncio.create_task(asyncio.sleep(0)).add_done_callback(lambda _: fail())
            async def failing():
                fail()
            task = asyncio.create_task(failing())
            await asyncio.sleep(0.01)
        asyncio.run(forgotten())
        thread = threading.Thread(target=fail)
        thread.start(), thread.join()
        fail()
    """.replace("{CANARY}", CANARY).replace("{FORM}", form)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert CANARY not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("ExceptionGroup") == done.stderr.count("KeyError") >= 6
    assert done.stderr.count("ValueError") >= 6 and done.stderr.count(" in fail") >= 6


def _around(text: bytes, found: bytes) -> bytes:
    place = text.index(found)
    return text[max(0, place - 200) : place + 200]
