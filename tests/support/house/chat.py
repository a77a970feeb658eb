"""The functions and files that one streamed chat goes through, in the gateway and in a worker.

Both are real processes with the bundled model. Of several equal chats those functions count that
every chat calls: what happens beside them, such as a pulse, falls into few of them.
"""

import os
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx

from house.counts import Count
from house.sources import Place
from penstock.compose.server import Server
from penstock.worker.bundled.paths import BUNDLED_MODEL
from stage import GatewayProcess
from worker_process import WorkerProcess

WINDOWS = range(1, 11)  # the numbers of the chats
CLEAN_UP_S = 0.05  # after the last byte
APART_S = 0.13  # so that no pulse keeps time with the chats
ENQUEUE = "Queue.enqueue"  # which brings the job to Redis


def chat_counts() -> dict[str, Count]:
    """Return the counts that traced chats give."""
    with tempfile.TemporaryDirectory() as folder:
        _trace_chats(Path(folder))
        calls = [_read_calls(path) for path in Path(folder).glob("*.calls")]
    chats = [{place for process in calls for place in process[window]} for window in WINDOWS]
    places = sorted(set.intersection(*chats))
    before = Counter(place.path for process in calls for place in _before_redis(process[1]))
    files = Counter(place.path for place in places)
    return {
        "functions of one chat": Count(len(places), places),
        "files of one chat": Count(
            len(files),
            [
                Place(path, 1, f"{number} functions, {before[path]} before the job is in Redis")
                for path, number in files.items()
            ],
        ),
    }


def _trace_chats(folder: Path) -> None:
    (folder / "window").write_bytes(b"\0")
    (folder / "sitecustomize.py").write_text(
        f"from house.tracer import prepare\n\nprepare({str(folder)!r})\n"
    )
    python_path = f"{folder}:.:tests:tests/support"
    with (
        Server() as server,
        GatewayProcess(server.url, python_path=python_path) as gateway,
        WorkerProcess(
            server.url, BUNDLED_MODEL, "--lease-ttl-ms", "60000", python_path=python_path
        ) as worker,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        (folder / "window").open("r+b", buffering=0) as now,
    ):
        worker.ready()
        for calls in folder.glob("*.calls"):
            with suppress(ProcessLookupError):
                os.kill(int(calls.stem), signal.SIGUSR2)
        for window in (0, 0, *WINDOWS):  # what is done once is done in the first
            now.seek(0)
            now.write(bytes([window]))
            _stream(http, worker.model)
            time.sleep(CLEAN_UP_S)
            now.seek(0)
            now.write(b"\0")
            time.sleep(APART_S)


def _stream(http: httpx.Client, model: str) -> None:
    message = {"role": "user", "content": "Say hello"}
    body = {"model": model, "messages": [message], "stream": True}
    body |= {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text


def _read_calls(path: Path) -> dict[int, list[Place]]:
    """Return the calls of a process, by the number of the chat."""
    calls: dict[int, list[Place]] = {window: [] for window in WINDOWS}
    for line in path.read_text().splitlines():
        window, file, number, name = line.split("\t")
        calls[int(window)].append(Place(Path(file), int(number), name))
    return calls


def _before_redis(calls: list[Place]) -> set[Place]:
    """Return the functions that a process calls before the one that brings the job to Redis."""
    names = [place.name for place in calls]
    return set(calls[: names.index(ENQUEUE)]) if ENQUEUE in names else set()
