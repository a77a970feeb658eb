"""A whole Penstock for a measurement: server, workers, gateway, each a real process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from urllib.error import URLError

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.machine.usage import cpu_s, family, module_of
from penstock.schemas.process.parent import end_with_parent

START_S = 120.0
STOP_S = 30.0


class DidNotStart(CannotMeasure):
    """Raised when a part of the system does not become ready; the message says which."""


class Part:
    """One `penstock` command in a process group of its own."""

    def __init__(
        self, *words: str, fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Start the command, with this process's open files `fds` under the same numbers.

        `env` are variables of its environment, beside those of this process.
        """
        self._name = words[0]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `kill`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.compose.cli", *words],
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
            pass_fds=fds,
            env=os.environ | dict(env or {}),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self, module: str = "") -> float:
        """Return the CPU time of all its processes, or of the one that runs a module."""
        pids = family(self.pid)
        return sum(cpu_s(pid) for pid in pids if not module or module_of(pid) == module)

    def check(self) -> None:
        """Raise DidNotStart, with the command's last line of output, if it has ended by itself."""
        status = self._process.poll()
        if status is not None:
            raise DidNotStart(f"it ended with status {status}; {self.last_words}")

    @property
    def last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines() or ["nothing"]
        return f"penstock {self._name} said: {lines[-1]}"

    def stop(self) -> None:
        """Let it end in order, as an operator would, so that it leaves no files behind."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill all of its processes at once, as the loss of a machine would."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._stderr.close()


@asynccontextmanager
async def system(*worker_flags: str, num_workers: int = 1) -> AsyncIterator["System"]:
    """Yield a system that is ready to take jobs; all of it ends with the block."""
    with Server() as server:
        flags = ("--redis-url", server.url, *worker_flags)
        workers = [Part("worker", *flags) for _ in range(num_workers)]
        try:
            async with QueueClient.from_url(server.url) as client:
                await _until_served(client, workers)
                yield System(server, workers, client)
        finally:
            for worker in workers:
                worker.kill()


class System:
    def __init__(self, server: Server, workers: list[Part], client: QueueClient) -> None:
        self.server = server
        self.workers = workers
        self.client = client

    @contextmanager
    def gateway(self) -> Iterator[tuple[Part, int]]:
        """Yield a gateway and its port."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port, fd = int(listener.getsockname()[1]), listener.fileno()
            part = Part("gateway", "--redis-url", self.server.url, "--fd", str(fd), fds=[fd])
            try:
                _until_answered(part, port)
                yield part, port
            finally:
                part.kill()


@asynccontextmanager
async def serving(model: str, *worker_flags: str) -> AsyncIterator[tuple[str, "System"]]:
    """Yield the URL of the gateway of a whole Penstock with one worker, and the system."""
    async with system("--model", model, *worker_flags) as whole:
        with whole.gateway() as (_, port):
            yield f"http://127.0.0.1:{port}", whole


@asynccontextmanager
async def stack(
    model: str, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """Yield the URL of `penstock serve`, with housekeeping and files, when its model is served."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    words, url = ("serve", model, "--port", str(port), *flags), f"http://127.0.0.1:{port}"
    part = Part(*words, env=env)
    try:
        until = time.monotonic() + START_S
        while not await asyncio.to_thread(_serves, url):
            part.check()
            if time.monotonic() > until:
                raise DidNotStart(f"it serves no model after {START_S:g} s; {part.last_words}")
            await asyncio.sleep(0.1)
        yield url
    finally:
        part.stop()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except (URLError, OSError):
        return False


async def _until_served(client: QueueClient, workers: list[Part]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        for part in workers:
            part.check()
        alive = [
            worker
            for queue in await client.queues()
            for worker in await queue.workers()
            if worker.lease_left_ms > 0
        ]
        if len(alive) >= len(workers):
            return
        await asyncio.sleep(0.1)
    raise DidNotStart(f"no worker started serving within {START_S:.0f} s; {workers[0].last_words}")


def _until_answered(part: Part, port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        part.check()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.05)
    raise DidNotStart("the gateway did not answer")
