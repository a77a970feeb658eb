"""A whole system for a test: a Redis, and workers, gateways and housekeeping, each by a relay.

Everything runs the fake model unless told otherwise, and ends with the `System`, whatever happened.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

from faults.proxy import Proxy
from faults.server_clock import ClockedServer, ServerClock
from penstock.compose.server import Server
from penstock.schemas.keys import Lane
from penstock.schemas.redis.group_sync import Durability
from worker_process import child_of, until

PATIENCE_S = 100.0
LEASE_MS = 1500
_PORT = re.compile(r"gateway listens on http://127\.0\.0\.1:(\d+)")
AppendFsync = Literal["everysec", "always"]
CHILDREN = ("penstock.worker.jobs.service", "penstock.worker.engine_process")


def skewed(shift_s: int) -> dict[str, str]:
    """The environment of a process whose host's clock is wrong."""
    folder = Path(__file__).parent / "skewed"
    path = f"{folder}:{folder.parents[2]}"
    return {"PYTHONPATH": path, "CLOCK_SHIFT_S": str(shift_s)}


class Process:
    """A program in a process group of its own, with its log in a file and a relay to Redis."""

    AT_WORK = ""  # what it logs once it is

    def __init__(
        self, module: str, words: list[str], proxy: Proxy, env: dict[str, str], query: str = ""
    ) -> None:
        self.proxy = proxy
        self._is_killed = "PENSTOCK_CRASH_GROUP" in env  # it will kill itself at a point
        self._is_told = False
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-fault-")
        self.log = Path(self._folder.name) / "log"
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--redis-url", proxy.url + query, *words],
                env=os.environ | env,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def complaint(self) -> str:
        """What is wrong with its end: that nobody asked for it, or a status that tells of more."""
        status = self.process.poll()
        was_early = status == -signal.SIGTERM and not self.logged()  # before it could know of ends
        if status is None or self._is_killed or (self._is_told and (status == 0 or was_early)):
            return ""
        return f"{type(self).__name__} ended by itself, status {status}: {self.logged()[-2000:]}"

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        """A signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """As a lost machine: all at once, and nobody left to say so."""
        self._is_killed = self._is_killed or self.is_alive
        self.send(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def kill_first(self) -> None:
        """The one process that was started; its children end with it."""
        self._is_killed = self._is_killed or self.is_alive
        self.process.kill()

    def terminate(self) -> None:
        self._is_told = self._is_told or self.is_alive
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self.kill()
        self.proxy.__exit__(None, None, None)
        self._folder.cleanup()

    def ready(self) -> Self:
        return self.wait_for(self.AT_WORK)

    def wait_for(self, line: str) -> Self:
        def is_there() -> bool:
            assert self.is_alive, self.logged()
            return line in self.logged()

        until(is_there, f"{line!r} in the log of {self.process.args}: {self.logged()[-2000:]}")
        return self


class Worker(Process):
    AT_WORK = " started serving "

    def __init__(self, model: str | Path, flags: list[str], proxy: Proxy, env: dict[str, str]):
        fake = ["--load-format", "fake"] if model == "fake" else []
        super().__init__(
            "penstock.worker.supervisor.cli", ["--model", str(model), *fake, *flags], proxy, env
        )

    def child(self, module: str) -> int | None:
        """The process id of one of `CHILDREN`; none while it is not there."""
        return child_of(self.process.pid, module)

    def kill_child(self, module: str) -> bool:
        child = self.child(module)
        if child is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        return True


class Gateway(Process):
    AT_WORK = "gateway listens on "

    def __init__(
        self, flags: list[str], proxy: Proxy, env: dict[str, str], query: str = ""
    ) -> None:
        self.query = query
        words = ["--port", "0", *flags]
        super().__init__("penstock.gateway.server.cli", words, proxy, env, query)

    @property
    def url(self) -> str | None:
        """Where it listens; none before it does."""
        found = _PORT.search(self.logged())
        return f"http://127.0.0.1:{found[1]}" if found else None


class Housekeeping(Process):
    AT_WORK = " started its chores"

    def __init__(self, flags: list[str], proxy: Proxy, env: dict[str, str]) -> None:
        super().__init__("penstock.gateway.housekeeping.main", flags, proxy, env)


class System:
    """Redis behind relays, and what was started on it.

    Redis writes its file through as `appendfsync` says. With durability `fsync` gateways and
    housekeeping answer and tell nothing before it is; with `replicas` a replica follows it all the
    time, and they wait for that one too.
    """

    def __init__(
        self,
        server: Server | None = None,
        model: str | Path = "fake",
        lease_ms: int = LEASE_MS,
        appendfsync: AppendFsync = "everysec",
        durability: Durability = "server",
    ) -> None:
        self._own_folder = tempfile.TemporaryDirectory(prefix="penstock-system-")
        folder = Path(self._own_folder.name) / "redis"
        at_once = {"repl-diskless-sync-delay": "0"}  # else it waits 5 s for more replicas
        self.clock = ServerClock(Path(self._own_folder.name))
        options = {"appendfsync": appendfsync} | at_once
        self.server = server or ClockedServer(self.clock, folder, options)
        self._standby: tuple[Server, Proxy] | None = None  # a replica, and how it hears
        self.durability = durability
        self.model = model
        self.lease_ms = lease_ms
        self.workers: list[Worker] = []
        self.gateways: list[Gateway] = []
        self.houses: list[Housekeeping] = []
        self.proxies: list[Proxy] = []
        self._starter = ThreadPoolExecutor(1)
        self.redis_lock = threading.Lock()  # one that harms it at a time
        self._safe = Path(), 0
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        return Path(self.model).name

    @property
    def lane(self) -> Lane:
        return Lane(self.name)

    @property
    def url(self) -> str:
        """Redis, with nothing in between."""
        return self.server.url

    @property
    def processes(self) -> list[Worker | Gateway | Housekeeping]:
        return [*self.workers, *self.gateways, *self.houses]

    def __enter__(self) -> Self:
        self.start_server()
        if self.durability == "replicas":
            self._standby = self._replica()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            process.close()
        for proxy in self.proxies:
            proxy.__exit__(None, None, None)
        servers = [self.server]
        if self._standby is not None:
            servers.append(self._standby[0])
            self._standby[1].__exit__(None, None, None)
        for server in servers:
            server.kill()
            server.stop()
        self._starter.shutdown()
        self._own_folder.cleanup()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What the processes logged is printed if the test fails."""
        try:
            yield
        except BaseException:
            for process in self.processes:
                print(f"--- {process.process.args}\n{process.logged()[-6000:]}")
            raise

    def proxy(self) -> Proxy:
        """One more relay to Redis, closed with the system."""
        self.proxies.append(Proxy(self.server.port).__enter__())
        return self.proxies[-1]

    def worker(self, *flags: str, **env: str) -> Worker:
        """Begin to start one; `ready` waits for it."""
        proxy = Proxy(self.server.port).__enter__()
        words = ["--lease-ttl-ms", str(self.lease_ms), *flags]
        self.workers.append(Worker(self.model, words, proxy, env))
        return self.workers[-1]

    def gateway(self, *flags: str, query: str = "", **env: str) -> Gateway:
        proxy = Proxy(self.server.port).__enter__()
        words = ["--durability", self.durability, *flags]
        self.gateways.append(Gateway(words, proxy, env, query))
        return self.gateways[-1]

    def housekeeping(self, *flags: str, **env: str) -> Housekeeping:
        proxy = Proxy(self.server.port).__enter__()
        words = ["--durability", self.durability, *flags]
        self.houses.append(Housekeeping(words, proxy, env))
        return self.houses[-1]

    def check_ends(self) -> None:
        """Every process runs, or was killed or told to end by the test."""
        found = [complaint for each in self.processes if (complaint := each.complaint)]
        assert not found, "; ".join(found)

    def ready(self) -> Self:
        for process in self.processes:
            process.ready()
        return self

    def gateway_urls(self) -> list[str]:
        """Of those that live."""
        return [each.url for each in self.gateways if each.is_alive and each.url]

    def replace(self, process: Worker | Gateway | Housekeeping, *flags: str) -> None:
        """Close one that is dead or is to die, and start another in its place.

        One that died by itself is no such: that is a fault, and stays to be seen.
        """
        assert not process.complaint, process.complaint
        process.close()
        if isinstance(process, Worker):
            self.workers.remove(process)
            self.worker(*flags)
        elif isinstance(process, Gateway):
            self.gateways.remove(process)
            self.gateway(*flags, query=process.query)
        else:
            self.houses.remove(process)
            self.housekeeping(*flags)

    def restart_server(self, away_s: float = 0.0) -> None:
        """Kill Redis and start it on what it wrote."""
        with self.redis_lock:
            self._wait_until_written()
            self.server.kill()
            time.sleep(away_s)
            self.start_server()

    def _wait_until_written(self) -> None:
        """Wait while a sync of the disk is under way, for which Redis puts off writing.

        What a kill loses then is `lose_tail`'s part.
        """
        client = redis.Redis.from_url(self.server.url, socket_timeout=5)
        with contextlib.suppress(redis.RedisError), client:
            until_s = time.monotonic() + 5
            while time.monotonic() < until_s:
                found = client.info("persistence")
                if not found.get("aof_pending_bio_fsync") and not found.get("aof_buffer_length"):
                    return
                time.sleep(0.005)

    def start_server(self) -> None:
        """In a thread that lives as long as the system: the server ends with its starter."""
        self._starter.submit(self.server.start).result()

    def note_written(self) -> None:
        """What Redis wrote so far is not lost by `lose_tail`: a disk loses what came last."""
        self._safe = _size_of(self._log_file())

    def lose_tail(self, num_bytes: int) -> None:
        """Kill Redis, cut so much off what it wrote, and start it on the rest."""
        with self.redis_lock:
            self.server.kill()
            path, size = _size_of(self._log_file())
            safe_path, safe = self._safe
            os.truncate(path, max(safe if path == safe_path else 0, size - num_bytes))
            self.start_server()

    def promote(self, lag_s: float) -> None:
        """Redis dies, and a replica that heard nothing for so long takes its place and port."""
        with self.redis_lock:
            old, (replica, way) = self.server, self._standby or self._replica()
            with redis.Redis.from_url(replica.url) as client:
                until(lambda: client.info()["master_link_status"] == "up", "the replica to follow")
                way.down.is_held = True
                time.sleep(lag_s)
                old.kill()
                client.replicaof("no", "one")
                client.config_set("port", old.port)
            way.__exit__(None, None, None)
            replica.port, self.server = old.port, replica
            self._standby = self._replica() if self._standby else None

    def _replica(self) -> tuple[Server, Proxy]:
        """Start a replica, and a relay through which it hears."""
        folder = Path(self._own_folder.name) / f"replica-{next(self._numbers)}"
        replica = ClockedServer(self.clock, folder, self.server.options)
        way = Proxy(self.server.port)
        self._starter.submit(replica.start).result()
        way.__enter__()
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", way.port)
        return replica, way

    def _log_file(self) -> Path:
        """The last part of the append-only file."""
        parts = (self.server.folder / "appendonlydir").glob("*.incr.aof")
        return max(parts, key=lambda part: int(part.name.split(".")[-3]))

    def freeze_server(self, lasts_s: float) -> None:
        with self.redis_lock:
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGSTOP)
            time.sleep(lasts_s)
            os.kill(self.server.pid, signal.SIGCONT)


def _size_of(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_size
