"""The queue from Node, by docs/examples/node: `make node` runs this, with nodejs and npm."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from faults.proxy import Proxy
from paths import ROOT
from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.event import EVENT, Event, Result
from penstock.schemas.keys import Lane
from penstock.schemas.redis.script import script_text
from penstock.worker.bundled.paths import BUNDLED_MODEL
from worker_process import WorkerProcess, ask

PROGRAM = ROOT / "docs" / "examples" / "node"
MODEL = BUNDLED_MODEL.name
LONG = {"max_tokens": 400, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with its packages and scripts, as its head says."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(PROGRAM, folder, ignore=shutil.ignore_patterns("node_modules", "*.lua"))
    shutil.copy(Path(__file__).parent / "follow.mjs", folder)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True)
    for name in ("enqueue", "attach", "cancel"):
        (folder / f"{name}.lua").write_text(script_text(f"jobs/{name}")[0])
    return folder


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server() as server, WorkerProcess(server.url, BUNDLED_MODEL).ready():
        yield server.url


class Reader:
    """`follow.mjs` in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            ["node", "follow.mjs", *words], cwd=folder, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def some(self, most: int) -> list[Event]:
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(most)]
        return [EVENT.validate_json(line) for line in lines]

    def rest(self) -> list[Event]:
        assert self.process.stdout is not None
        # Not `communicate`, which passes over what the stream read ahead for `some`.
        events = [EVENT.validate_json(line) for line in self.process.stdout]
        assert self.process.wait(60) == 0
        return events


def asked(**params: Any) -> tuple[str, str]:
    """A job's id and what it asks, in JSON."""
    job_id = Lane(MODEL).new_job_id()
    return job_id, json.dumps(
        {"job_id": job_id, "model": MODEL, "prompts": ["Once upon a time"], "params": params}
    )


def by_sdk(url: str, job_id: str) -> list[Event]:
    """What the SDK reads of the same job."""
    events: list[Event] = []

    async def read(client: QueueClient) -> None:
        events.extend([event async for event in client.stream(job_id)])

    ask(url, read)
    return events


def answer_of_sdk(url: str, **params: Any) -> Result:
    """What the SDK gets for the same prompt under the same parameters."""
    results: list[Result | None] = []

    async def enqueue(client: QueueClient) -> None:
        job_id = await client.enqueue("Once upon a time", background=True, **params)
        results.append(await client.result(job_id))

    ask(url, enqueue)
    assert results[0] is not None
    return results[0]


def cut(client: "redis.Redis[str]") -> int:
    """Close the connections of Node, as a network would; how many there were."""
    mine = [each for each in client.client_list() if each["name"] == "penstock-node"]
    for each in mine:
        client.execute_command("CLIENT", "KILL", "ID", each["id"])
    return len(mine)


@contextmanager
def cutting(url: str) -> Iterator[list[int]]:
    """Cut all connections of Node again and again."""
    stop, counts = threading.Event(), list[int]()

    def run() -> None:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            while not stop.wait(0.05):
                counts.append(cut(client))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def test_the_program_streams_a_job_and_cancels_another(folder: Path, url: str) -> None:
    ran = subprocess.run(
        ["node", "penstock.mjs", url, MODEL], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    said = re.fullmatch(
        r"(job_\S+): accepted\n(.+)\nended: done\ntokens: \d+\n\S+: cancelled\n", ran.stdout, re.S
    )
    assert said is not None, ran.stdout
    assert said[2] == "".join(getattr(event, "text", "") for event in by_sdk(url, said[1]))


def test_a_job_reads_as_with_the_sdk_although_its_connections_are_cut(
    folder: Path, url: str
) -> None:
    job_id, job = asked(**LONG)
    with Reader(folder, url, job) as reader, cutting(url) as counts:
        first = reader.some(1)
        events = first + reader.rest()
    assert counts.count(2) > 2, "both connections were cut in the middle"
    assert events == by_sdk(url, job_id)
    assert "".join(getattr(event, "text", "") for event in events) == (
        answer_of_sdk(url, **LONG).choices[0].text
    )


def test_a_connection_that_falls_silent_is_made_anew(folder: Path, url: str) -> None:
    job_id, job = asked(**LONG)
    port = urlsplit(url).port
    assert port is not None
    with Proxy(port) as proxy, Reader(folder, proxy.url, job) as reader:
        events = reader.some(3)
        proxy.silence()
        events += reader.rest()
    assert events == by_sdk(url, job_id)


def test_another_process_reads_on_where_one_died(folder: Path, url: str) -> None:
    job_id, job = asked(**LONG)
    with Reader(folder, url, job) as reader:
        before = reader.some(5)
        reader.process.kill()
    at = before[-1]
    with Reader(folder, url, job, f"{at.end}", f"{at.checksum}") as reader:
        after = reader.rest()
    assert before + after == by_sdk(url, job_id)


def test_a_reader_of_another_log_is_told(folder: Path, url: str) -> None:
    _, job = asked(**LONG)
    with Reader(folder, url, job) as reader:
        at = reader.rest()[0]
    with Reader(folder, url, job, f"{at.end}", f"{at.checksum ^ 1}") as reader:
        out, _ = reader.process.communicate(timeout=60)
        assert out == "" and reader.process.returncode != 0
