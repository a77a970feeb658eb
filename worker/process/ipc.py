"""IPC: the wires between a worker's own processes, frames of plain values over a socket pair.

Both ends run the same code and are started together, so the frames are pickles. Nothing that came
from outside is ever unpickled.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Generic, TypeVar

import msgspec
from pydantic import JsonValue

from penstock.schemas.delivery import JobSignal
from penstock.schemas.event import of_report, to_report
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.messages import (
    BlockChange,
    Command,
    Load,
    Output,
    ResetPrefixCache,
    Sleep,
    Stats,
    Wake,
)

_HEADER = struct.Struct("!I")
_READ_BYTES = 1 << 18


# To the engine.


@dataclass(frozen=True, slots=True)
class Pause:
    """Take no step until Resume, since the I/O side cannot take more outputs."""


@dataclass(frozen=True, slots=True)
class Resume:
    pass


EngineCommand = Command | Pause | Resume


# From the engine.


@dataclass(frozen=True, slots=True)
class Ready:
    """The weights are loaded; the engine takes sequences from now on."""

    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of one step, and the engine's state after it.

    It is also sent when there are no outputs and the rest changed, so the latest one is always
    true.

    num_commands  number of commands that the engine carried out since its start
    seconds     time that a step takes of late; 0 before the first step
    changes     what changed in the prefix cache, in order; none where nobody follows it
    """

    outputs: list[Output]
    load: Load
    num_commands: int = 0
    seconds: float = 0.0
    changes: list[BlockChange] = field(default_factory=list)

    def __reduce__(self) -> "tuple[Callable[..., Step], tuple[bytes, *_RestOfStep]]":
        """Pickle the outputs as one string of bytes.

        Pickled one by one, 256 outputs would cost the engine's loop 0.4 ms a step.
        """
        rest = self.load, self.num_commands, self.seconds, self.changes
        return _step, (_ENCODER.encode(self.outputs), *rest)


_RestOfStep = tuple[Load, int, float, list[BlockChange]]
_ENCODER = msgspec.msgpack.Encoder(enc_hook=to_report)
_DECODER = msgspec.msgpack.Decoder(list[Output], dec_hook=of_report)


def _step(outputs: bytes, *rest: *_RestOfStep) -> Step:
    return Step(_DECODER.decode(outputs), *rest)


EngineEvent = Ready | Step


# From the engine to the supervisor.


@dataclass(frozen=True, slots=True)
class Pulse:
    """The sign of life that a thread beside the engine's loop sends at intervals.

    `unmoved_s` is the time for which there was work and nothing was computed, as far as its process
    was awake; 0 while the engine moves, is idle or is paused.
    """

    unmoved_s: float
    stats: Stats


# From the supervisor to the I/O process.


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Begin a lease session: take jobs under this name, whose lease runs."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease was renewed by a call that began at this time of the monotonic clock."""

    began_s: float


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the lease session, whose lease was lost: drop all jobs and write nothing for them."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals that a renewal of the lease gave for jobs in work."""

    signals: dict[str, JobSignal]


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new jobs, hand back those that still run after `seconds`, and send Drained."""

    seconds: float


WorkerCommand = (
    BeginSession | Renewed | EndSession | Signals | Drain | ResetPrefixCache | Sleep | Wake
)


# From the I/O process to the supervisor.


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine is loaded: a lease session may begin."""

    limits: EngineLimits
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Drained:
    pass


@dataclass(frozen=True, slots=True)
class Alive:
    """The event loop turns. The rest is of `JobCounts`, for the worker's statistics."""

    counts: dict[str, JsonValue] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    models: dict[str, dict[str, JsonValue]] = field(default_factory=dict)


WorkerEvent = Prepared | Drained | Alive

Received = TypeVar("Received")
Sent = TypeVar("Sent")


class Closed(Exception):
    """Raised when the other end is gone."""


class BlockingWire(Generic[Received, Sent]):
    """An end of a wire for threads. One thread may receive and one may send."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, value: Sent) -> None:
        try:
            self._end.sendall(_frame(value))
        except OSError as error:
            raise Closed from error

    def received(self) -> Iterator[Received]:
        """Yield what comes, until the other end closes. What it left unread is no error."""
        with self._end.makefile("rb") as stream:
            while len(header := _read(stream, _HEADER.size)) == _HEADER.size:
                (size,) = _HEADER.unpack(header)
                if len(frame := _read(stream, size)) < size:
                    return
                value: Received = pickle.loads(frame)
                yield value


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read so many bytes, or fewer where the other end closed, with what it had not read or not."""
    try:
        return stream.read(size)
    except OSError:
        return b""


class Channel(Generic[Received, Sent]):
    """An end of a wire for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> "Channel[Received, Sent]":
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end, limit=_READ_BYTES))

    def send(self, value: Sent) -> None:
        """Queue a value at once. Raises Closed.

        The other end reads all the time, so the queue stays short.
        """
        if self._writer.is_closing():
            raise Closed
        self._writer.write(_frame(value))

    def send_text(self, text: str) -> None:
        """Send a text as the first frame of a connection, for `receive_text`."""
        self._writer.write(_frame(text))

    async def received(self) -> AsyncIterator[Received]:
        """Yield what comes, until the other end closes."""
        try:
            while True:
                (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                value: Received = pickle.loads(await self._reader.readexactly(size))
                yield value
        except (asyncio.IncompleteReadError, OSError):
            return

    def close(self) -> None:
        self._writer.close()


def _frame(value: object) -> bytes:
    frame = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(frame)) + frame


def receive_text(end: socket.socket) -> str:
    """Return the first frame of a connection, a text, and read not a byte more."""
    (size,) = _HEADER.unpack(_exactly(end, _HEADER.size))
    text = pickle.loads(_exactly(end, size))
    assert isinstance(text, str)
    return text


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = end.recv(size - len(data))
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        data += part
    return data
