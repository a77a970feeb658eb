"""The sandbox in which grammars are tried before the engine compiles them.

It is a process that may be killed.
"""

import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from threading import Lock

from penstock.schemas.errors import WorkerFailed
from penstock.worker.engine.grammar import sandbox_process
from penstock.worker.engine.grammar.sandbox_process import (
    Question,
    SandboxAnswer,
    Start,
    Verdict,
    receive,
    send,
)
from penstock.worker.engine.grammar.structured import FormKind

_START_S = 120.0  # to load a large vocabulary on a busy machine
_GRACE_S = 20.0  # after the limits; then the process itself hangs


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one attempt."""

    cpu_s: int = 2
    wall_s: float = 10.0  # long, since a busy machine is no fault of the grammar
    memory_bytes: int = 1 << 30  # in addition to what the tokenizer takes


class OverLimit(ValueError):
    """Raised where an attempt ended at its limits."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A grammar that was compiled once within the limits."""

    grammar: str
    num_bytes: int  # approximate memory


class Sandbox:
    """Tries grammars, several at once and from any thread. Its process starts with the first."""

    def __init__(
        self,
        backend: str,
        vocab_size: int,
        eos_token_ids: list[int],
        limits: SandboxLimits = SandboxLimits(),
    ) -> None:
        """Take the tokenizer as JSON in `backend`, and the limits of each attempt."""
        self._limits = limits
        self._start = Start(
            backend=backend,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            cpu_s=limits.cpu_s,
            wall_s=limits.wall_s,
            memory_bytes=limits.memory_bytes,
        )
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def attempt(self, kind: FormKind, text: str) -> Tried:
        """Compile the grammar of a text within the limits.

        Raises ValueError with the reason why there is no grammar, and WorkerFailed when none could
        be tried, which is not the text's fault.
        """
        return self._asked(Question(kind=kind, text=text, completion=None))

    def schema_error(self, schema: str, completion: str) -> str:
        """Return why the completion is not what the schema says; "" where it is."""
        try:
            self._asked(Question(kind="json", text=schema, completion=completion))
        except OverLimit:
            return f"not checked: that takes more than {self._limits.cpu_s} s, or too much memory"
        except WorkerFailed as error:
            return f"not checked: {error}"
        except ValueError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the process; attempts under way end by their own limits."""
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.kill()
                self._process.wait()
            self._process = self._control = None

    def _asked(self, question: Question) -> Tried:
        try:
            return self._ask(question)
        except (OSError, EOFError):
            self.close()  # somebody killed the process: start it again
        try:
            return self._ask(question)
        except (OSError, EOFError) as error:
            self.close()
            raise WorkerFailed("grammars cannot be tried: the sandbox ended") from error

    def _ask(self, question: Question) -> Tried:
        wire, child_wire = socket.socketpair()
        with wire:
            with child_wire:
                socket.send_fds(self._started(), [b"g"], [child_wire.fileno()])
            wire.settimeout(self._limits.wall_s + _GRACE_S)
            send(wire, question)
            message = json.loads(receive(wire))
            answer: SandboxAnswer | None = message if "grammar" in message else None
            verdict: Verdict = message if answer is None else json.loads(receive(wire))
        if answer is None:
            raise OverLimit(_why(verdict["status"], self._limits))
        if answer["reason"]:
            raise ValueError(answer["reason"])
        return Tried(answer["grammar"], verdict["num_bytes"])

    def _started(self) -> socket.socket:
        with self._lock:
            if self._control is None:
                wire, child_wire = socket.socketpair()
                with child_wire:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", sandbox_process.__name__, str(child_wire.fileno())],
                        pass_fds=[child_wire.fileno()],
                        stdin=subprocess.DEVNULL,
                    )
                self._control = wire
                wire.settimeout(_START_S)
                send(wire, self._start)
                receive(wire)
            return self._control


def _why(status: int, limits: SandboxLimits) -> str:
    """Return the reason that names the limit at which the process ended."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"compiling it takes more than {limits.cpu_s} s; make it simpler"
    if status == -signal.SIGALRM:
        return f"compiling it took more than {limits.wall_s:g} s; make it simpler, or try again"
    mebibytes = limits.memory_bytes >> 20
    return f"compiling it takes more than {mebibytes} MiB, or breaks the compiler; make it simpler"
