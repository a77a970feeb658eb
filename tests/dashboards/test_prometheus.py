"""Prometheus asks a service under load, of which each part is killed: `make dashboards`.

It needs Debian's prometheus, or a path to one in PROMETHEUS.
"""

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from paths import ROOT
from penstock.compose.server import Server
from stage import GatewayProcess, HousekeepingProcess, eventually
from worker_process import WorkerProcess

TELEMETRY = ROOT / "compose" / "telemetry"
FLAGS = ("--fake-step-ms", "5")
BODY = {"model": "fake", "prompt": "a prompt of some tokens", "max_tokens": 600, "ignore_eos": True}


class Service:
    """Two workers, housekeeping and a load, for gateways that come and go on one port."""

    def __init__(self, ends: ExitStack, folder: Path) -> None:
        self.server = ends.enter_context(Server(folder=folder / "redis"))
        self.port = free_port()
        self.housekeeping = ends.enter_context(HousekeepingProcess(self.server.url))
        self.workers = [
            ends.enter_context(WorkerProcess(self.server.url, "fake", *FLAGS)) for _ in range(2)
        ]
        for worker in self.workers:
            worker.ready()
        self.statuses: list[int | str] = []
        self._stopping = threading.Event()
        for _ in range(12):
            caller = threading.Thread(target=self._load)
            caller.start()
            ends.callback(caller.join)
            ends.callback(self._stopping.set)

    def new_gateway(self) -> GatewayProcess:
        return GatewayProcess(self.server.url, "--port", str(self.port))

    def _load(self) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as http:
            while not self._stopping.is_set():
                try:
                    for model in ("fake", "unknown"):  # the other one is refused
                        asked = http.post("/v1/completions", json=BODY | {"model": model})
                        self.statuses.append(asked.status_code)
                except httpx.HTTPError as error:
                    self.statuses.append(type(error).__name__)
                    time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[httpx.Client]:
    """The configuration of compose/, with these targets in place of the names of containers."""
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    assert program, "apt-get install prometheus, or give the path of one in PROMETHEUS"
    made = yaml.safe_load((TELEMETRY / "prometheus.yaml").read_text())
    [job] = made["scrape_configs"]
    job.pop("dns_sd_configs")
    job["static_configs"] = [{"targets": list(targets)}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(made))
    port = free_port()
    process = subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=(folder / "prometheus.log").open("w"),
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            eventually(lambda: is_ready(http), within_s=60)
            yield http
    finally:
        process.kill()
        process.wait()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(http: httpx.Client, query: str) -> list[float]:
    """The values of a query now; not asked for too often, since the service needs the processor."""
    time.sleep(0.3)
    answer = http.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    return [float(each["value"][1]) for each in answer["data"]["result"]]


def queries() -> list[str]:
    found = []
    for path in sorted((TELEMETRY / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [target["expr"] for target in panel["targets"]]
    return [each.replace("$__rate_interval", "20s").replace("$model", ".*") for each in found]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with ExitStack() as ends:
        service = Service(ends, tmp_path_factory.mktemp("service"))
        yield service
        assert 500 not in service.statuses


@pytest.fixture(scope="module")
def http(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, f"127.0.0.1:{service.port}") as http:
        yield http


@pytest.fixture
def gateway(service: Service, http: httpx.Client) -> Iterator[GatewayProcess]:
    with service.new_gateway() as gateway:
        told(http, "penstock:queue_reachable", 1)
        yield gateway


def told(http: httpx.Client, query: str, value: float) -> None:
    eventually(lambda: ask(http, query) == [value], within_s=60)


def told_more(http: httpx.Client, query: str, before: list[float]) -> None:
    eventually(lambda: ask(http, query) > before, within_s=60)


def test_every_query_of_the_dashboards_gives_figures(
    gateway: GatewayProcess, http: httpx.Client
) -> None:
    told_more(http, "sum(vllm:generation_tokens_total)", [1000])
    time.sleep(21)  # rates are of 20 seconds
    empty = [each for each in queries() if not ask(http, each)]
    assert len(queries()) > 30 and not empty


def test_a_killed_worker_shows_and_its_jobs_go_on(
    service: Service, gateway: GatewayProcess, http: httpx.Client
) -> None:
    lost = "sum(penstock:worker_lapses_total)+sum(penstock:worker_crashes_total)"
    requeued = "sum(penstock:jobs_requeued_total)"
    told(http, "sum(penstock:workers_alive)", 2)
    before, moved = ask(http, lost), ask(http, requeued)
    service.workers[0].kill()
    told(http, "sum(penstock:workers_alive)", 1)
    told_more(http, lost, before)
    told_more(http, requeued, moved)
    with WorkerProcess(service.server.url, "fake", *FLAGS).ready():
        told(http, "sum(penstock:workers_alive)", 2)


def test_a_killed_gateway_shows_and_another_takes_its_port(
    service: Service, gateway: GatewayProcess, http: httpx.Client
) -> None:
    gateway.process.kill()
    gateway.process.wait()
    told(http, "up", 0)
    with service.new_gateway():
        told(http, "up", 1)
        told(http, "penstock:queue_reachable", 1)


def test_dead_housekeeping_shows(
    service: Service, gateway: GatewayProcess, http: httpx.Client
) -> None:
    told(http, "penstock:housekeeping_alive", 1)
    service.housekeeping.kill()
    told(http, "penstock:housekeeping_alive", 0)
    with HousekeepingProcess(service.server.url):
        told(http, "penstock:housekeeping_alive", 1)


def test_dead_redis_shows_and_the_service_goes_on(
    service: Service, gateway: GatewayProcess, http: httpx.Client
) -> None:
    told_more(http, "sum(penstock:jobs_ended_total)", [0])
    service.server.kill()
    told(http, "penstock:queue_reachable", 0)
    service.server.start()
    told(http, "penstock:queue_reachable", 1)
    ended = ask(http, "sum(penstock:jobs_ended_total)")
    told_more(http, "sum(penstock:jobs_ended_total)", ended)
