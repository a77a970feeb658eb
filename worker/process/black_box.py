"""The black box: records of a worker's processes that outlive them, in files of their supervisor.

A process that is killed can say nothing any more. So the engine notes what it is about to compute,
in memory that outlives it. The interpreter writes where each thread is when the process dies of a
fault, or is asked. The records hold ids, counts and places in the code: no text, no token, no key.
"""

import asyncio
import faulthandler
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from threading import Lock
from types import TracebackType

import msgspec
from pydantic import JsonValue, TypeAdapter

from penstock.schemas.process.start import places
from penstock.worker.engine.io.messages import AddSequence, CancelSequence, Command, PlanRow

_STEPS = 0, 16, 65536  # offset, slots, bytes of a slot
_EVENTS = 16 * 65536, 256, 256  # the same, behind the steps
_RECORDS_BYTES = _EVENTS[0] + 256 * 256
_STACK_BYTES = 65536
_MOST_ROWS = 800  # rows of a step's plan, which is what a slot holds
_ASK = signal.SIGUSR1
_ASK_S, _LOOK_S = 1.0, 0.02
_RECORD: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


class Ring:
    """A ring of the latest records, in a part of a file that several processes have mapped.

    A slot counts as empty while it is written, so a record that a death left half written is
    not read.
    """

    _HEADER = struct.Struct("<QI")  # number, from 1; bytes

    def __init__(self, fd: int, offset: int, num_slots: int, slot_bytes: int) -> None:
        self._memory = mmap.mmap(fd, num_slots * slot_bytes, offset=offset)
        self._num_slots, self._slot_bytes = num_slots, slot_bytes
        self._number = 0
        self._lock = Lock()

    def write(self, record: bytes) -> bool:
        """Write a record over the oldest one. Return False if it is too long for a slot."""
        if len(record) > self._slot_bytes - self._HEADER.size:
            return False
        with self._lock:
            at = self._number % self._num_slots * self._slot_bytes
            self._number += 1
            body = at + self._HEADER.size
            self._HEADER.pack_into(self._memory, at, 0, 0)
            self._memory[body : body + len(record)] = record
            self._HEADER.pack_into(self._memory, at, self._number, len(record))
        return True

    def records(self) -> list[bytes]:
        """Return the records, oldest first."""
        slots = {}
        for at in range(0, self._num_slots * self._slot_bytes, self._slot_bytes):
            number, size = self._HEADER.unpack_from(self._memory, at)
            body = at + self._HEADER.size
            if number:
                slots[number] = self._memory[body : body + size]
        return [slots[number] for number in sorted(slots)]


class Recorder:
    """The engine's side of the black box: it notes what is computed and what is ordered."""

    def __init__(self, fd: int) -> None:
        self._steps, self._events = Ring(fd, *_STEPS), Ring(fd, *_EVENTS)

    def note_plan(self, plan: Sequence[PlanRow]) -> None:
        """Note a step's plan, before the step is computed. 256 sequences cost about 20 us."""
        summary = {
            "time_s": time.time(),
            "num_seqs": len(plan),
            "num_tokens": sum(row[1] for row in plan),
        }
        record = msgspec.json.encode(summary | {"seqs": plan[:_MOST_ROWS]})
        if not self._steps.write(record):
            self._steps.write(msgspec.json.encode(summary))

    def note_command(self, command: Command) -> None:
        match command:
            case AddSequence(seq_id, prompt, completion=completion):
                self.note("added", seq_id, len(prompt), len(completion))
            case CancelSequence(seq_id):
                self.note("cancelled", seq_id)

    def note(self, event: str, seq_id: str, *counts: int | str) -> None:
        self._events.write(msgspec.json.encode([time.time(), event, seq_id, *counts]))


def leave_stacks(fd: int) -> None:
    """Have this process's stacks written to a file.

    Where all threads are is written when the process dies of a fault and when its supervisor
    asks; type and places of an exception are written when that ends it.
    """
    faulthandler.enable(fd)
    faulthandler.register(_ASK, fd)
    say = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        os.write(fd, "\n".join(places(error)).encode())
        say(kind, error, trace)

    sys.excepthook = leave


class BlackBox:
    """The supervisor's side of the black box, for one engine process and one I/O process."""

    def __init__(self, records_fd: int, stack_fds: dict[str, int]) -> None:
        self._records_fd = records_fd
        self._stack_fds = stack_fds
        self._steps, self._events = Ring(records_fd, *_STEPS), Ring(records_fd, *_EVENTS)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def fds(self, part: str) -> list[int]:
        """Return the files of a process ("engine" or "io"), for its command line."""
        records = [self._records_fd] if part == "engine" else []
        return [self._stack_fds[part], *records]

    def watch(self, part: str, process: asyncio.subprocess.Process) -> None:
        self._processes[part] = process

    def records(self) -> dict[str, JsonValue]:
        """Return the last steps and events as of now."""
        return {
            "steps": [_RECORD.validate_json(record) for record in self._steps.records()],
            "events": [_RECORD.validate_json(record) for record in self._events.records()],
        }

    async def remains(self) -> dict[str, JsonValue]:
        """Return how each process ended, or that it still runs, and where its threads are."""
        await asyncio.gather(*map(self._ask, self._processes))
        return {
            part: {
                "pid": process.pid,
                "exit": _exit(process.returncode),
                "stack": [*self._stack(part).decode(errors="replace").splitlines()],
            }
            for part, process in self._processes.items()
        }

    async def _ask(self, part: str) -> None:
        """Wait for the stacks of a process that lives; one that is stopped does not answer."""
        if self._processes[part].returncode is not None:
            return
        self._processes[part].send_signal(_ASK)
        give_up_s, before = time.monotonic() + _ASK_S, b""
        while time.monotonic() < give_up_s:
            await asyncio.sleep(_LOOK_S)
            if before and before == self._stack(part):
                return
            before = self._stack(part)

    def _stack(self, part: str) -> bytes:
        return os.pread(self._stack_fds[part], _STACK_BYTES, 0)


@contextmanager
def black_box() -> Iterator[BlackBox]:
    with TemporaryFile() as records, TemporaryFile() as engine, TemporaryFile() as io:
        records.truncate(_RECORDS_BYTES)
        yield BlackBox(records.fileno(), {"engine": engine.fileno(), "io": io.fileno()})


def _exit(status: int | None) -> int | str | None:
    """Return an exit status, or the name of the signal that ended the process.

    None means that it runs.
    """
    return signal.Signals(-status).name if status is not None and status < 0 else status
