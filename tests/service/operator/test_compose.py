"""What compose/ says is run here, but for the images: its commands, its files, its dashboards."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from collector import Collector
from paths import ROOT
from penstock.compose.server import Server
from stage import eventually

COMPOSE = ROOT / "compose"
FILE = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
PARTS = ("gateway", "worker", "housekeeping")
NAME = re.compile(r"\b(?:vllm|penstock):\w+")
LISTENS = re.compile(r"http://0\.0\.0\.0:(\d+)")


def given(text: str, places: dict[str, str]) -> str:
    """A value of the file, with the defaults of its variables and our places for its own."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    for place, ours in places.items():
        text = text.replace(place, ours)
    return text


def places_of(name: str, places: dict[str, str]) -> dict[str, str]:
    """The places as a service sees them, which has a volume of secrets of its own."""
    return places | {"/secrets": f"{places['/secrets']}/{name}"}


def started(name: str, places: dict[str, str], log: Path, *more: str) -> subprocess.Popen[bytes]:
    service, places = FILE["services"][name], places_of(name, places)
    words = [given(word, places) for word in service["command"]]
    environment = {name: given(each, places) for name, each in service["environment"].items()}
    kept = {each: value for each, value in os.environ.items() if not each.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.compose.cli", *words, *more],
        env=kept | environment,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, dict[str, str], Collector]]:
    """The services of the file as processes; the URL of the gateway."""
    folder = tmp_path_factory.mktemp("compose")
    secrets = folder / "secrets"
    with ExitStack() as ends, Collector() as collector:
        places = {"/secrets": str(secrets), "/files": str(folder / "files")}
        places["http://collector:4318/v1/traces"] = collector.url
        server = ends.enter_context(Server())
        made = [given(word, places) for word in FILE["services"]["passwords"]["command"]]
        made = [word.replace("redis:6379", f"127.0.0.1:{server.port}") for word in made]
        subprocess.run([sys.executable, "-m", "penstock.compose.cli", *made], check=True)
        with redis.Redis(port=server.port) as admin:
            for rule in (secrets / "redis" / "users.acl").read_text().splitlines()[::-1]:
                admin.execute_command("ACL", "SETUSER", *rule.split(" ")[1:])
        for name in PARTS:
            more = ("--port", "0") if name == "gateway" else ()
            process = started(name, places, folder / f"{name}.log", *more)
            ends.callback(process.wait)
            ends.callback(process.terminate)
        gateway = folder / "gateway.log"
        eventually(lambda: LISTENS.search(gateway.read_text()) is not None)
        found = LISTENS.search(gateway.read_text())
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}"
        eventually(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
        body = {"model": "penstock-5m", "messages": [{"role": "user", "content": "Hi"}]}
        asked = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert asked.status_code == 200
        yield url, places, collector


@pytest.mark.slow
def test_its_services_serve_and_are_healthy(
    stack: tuple[str, dict[str, str], Collector], tmp_path: Path
) -> None:
    url, places, collector = stack
    eventually(lambda: {span.service for span in collector.spans} == SENDERS)
    check = FILE["services"]["worker"]["healthcheck"]["test"]
    health = given(check, places_of("worker", places)).replace("$$", "$")
    run = health.replace("penstock ", f"{sys.executable} -m penstock.compose.cli ", 1)
    elsewhere = tmp_path / "uname"
    elsewhere.write_text("#!/bin/sh\necho another\n")
    elsewhere.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name != "HOSTNAME"}
    for path, status in ((own["PATH"], 0), (f"{tmp_path}:{own['PATH']}", 1)):
        found = subprocess.run(["sh", "-c", run], env=own | {"PATH": path}, check=False)
        assert found.returncode == status, path
    live = FILE["services"]["gateway"]["healthcheck"]["test"]
    code = live[-1].replace("http://127.0.0.1:8000", url)
    subprocess.run([sys.executable, *live[2:-1], code], check=True)
    operator = FILE["services"]["operator"]["environment"]["PENSTOCK_CONFIG"]
    made = [sys.executable, "-m", "penstock.compose.cli", *shlex.split("keys create --tenant acme")]
    secret = FILE["services"]["operator"]["environment"]["PENSTOCK_SERVER_SECRET_FILE"]
    environment = {"PENSTOCK_CONFIG": operator, "PENSTOCK_SERVER_SECRET_FILE": secret}
    at = places_of("operator", places)
    settings = {name: given(each, at) for name, each in environment.items()}
    kept = {each: value for each, value in os.environ.items() if not each.startswith("PENSTOCK_")}
    key = subprocess.run(made, env=kept | settings, capture_output=True, text=True, check=True)
    text = re.search(r"psk_\S+", key.stdout)
    assert text is not None, key.stdout
    let_in = {"authorization": f"Bearer {text[0]}"}
    eventually(lambda: httpx.get(f"{url}/v1/models").status_code == 401)
    assert httpx.get(f"{url}/v1/models", headers=let_in).status_code == 200


SENDERS = {"penstock-gateway", "penstock-worker"}


def test_every_query_of_the_dashboards_names_a_metric_that_is_there(
    stack: tuple[str, dict[str, str], Collector],
) -> None:
    queries = set[str]()
    for path in sorted((COMPOSE / "telemetry" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        found += [each["query"] for each in board["templating"]["list"]]
        assert len(found) > 12 and all(NAME.search(query) for query in found)
        queries |= set(found)
    named = set(NAME.findall(" ".join(queries)))

    def missing() -> set[str]:
        return named - set(NAME.findall(httpx.get(f"{stack[0]}/metrics").text))

    eventually(lambda: not missing(), within_s=20)  # a worker's figures come with its next beat


def test_each_service_reads_its_own_secrets_alone() -> None:
    made = dict(each.split(":")[:2] for each in FILE["services"]["passwords"]["volumes"])
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    for name, service in FILE["services"].items():
        read = [each for each in service.get("volumes", []) if each.startswith("secrets")]
        role = "worker" if name == "worker-gpu" else name
        if name != "passwords" and read:
            assert read == [f"secrets-{role}:/secrets:ro"]
            assert made[f"secrets-{role}"] == f"/secrets/{role}"
            assert f" /secrets/{role} " in dockerfile  # its owner is the volume's


def test_what_is_mounted_is_there() -> None:
    volumes = set(FILE["volumes"])
    for name, service in FILE["services"].items():
        for volume in service.get("volumes", []):
            source = given(volume, {}).split(":")[0]
            is_there = source in volumes or source == "./models" or (COMPOSE / source).exists()
            assert is_there, (name, volume)
        for other in service.get("depends_on", {}):
            assert other in FILE["services"]
    for path in (COMPOSE / "telemetry").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())
    datasources = yaml.safe_load((COMPOSE / "telemetry" / "grafana-datasources.yaml").read_text())
    assert {each["uid"] for each in datasources["datasources"]} == {"prometheus", "jaeger"}
