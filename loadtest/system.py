"""A whole queue of its own for a measurement: server, workers, gateway, each a real process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.error import URLError

from compose.server import Server
from gateway.client import Client
from loadtest.machine import cpu_s, family, module_of

START_S = 120.0


class DidNotStart(RuntimeError):
    """A part of the system did not become ready; the message says which."""


class Part:
    """One `penstock` command in a process group of its own."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "compose.cli", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self, module: str = "") -> float:
        """Of all its processes, or of the one that runs a module."""
        pids = family(self.pid)
        return sum(cpu_s(pid) for pid in pids if not module or module_of(pid) == module)

    def kill(self) -> None:
        """All of its processes at once, as a lost machine would."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@asynccontextmanager
async def system(*worker_flags: str, num_workers: int = 1) -> AsyncIterator["System"]:
    """Ready to take jobs; all of it ends with the block."""
    with Server() as server:
        flags = ("--redis-url", server.url, *worker_flags)
        workers = [Part("worker", *flags) for _ in range(num_workers)]
        try:
            async with Client.from_url(server.url) as client:
                await _until_served(client, num_workers)
                yield System(server, workers, client)
        finally:
            for worker in workers:
                worker.kill()


class System:
    def __init__(self, server: Server, workers: list[Part], client: Client) -> None:
        self.server = server
        self.workers = workers
        self.client = client

    @contextmanager
    def gateway(self) -> Iterator[tuple[Part, int]]:
        """A gateway and its port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        part = Part("gateway", "--redis-url", self.server.url, "--port", str(port))
        try:
            _until_answered(port)
            yield part, port
        finally:
            part.kill()


async def _until_served(client: Client, num_workers: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        living = [
            worker
            for queue in await client.queues()
            for worker in await queue.workers()
            if worker.lease_left_ms > 0
        ]
        if len(living) >= num_workers:
            return
        await asyncio.sleep(0.1)
    raise DidNotStart(f"{num_workers} workers did not take up work within {START_S:.0f} s")


def _until_answered(port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.05)
    raise DidNotStart("the gateway did not answer")
