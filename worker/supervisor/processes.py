"""The I/O side and the engine as two processes that the supervisor starts."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from penstock.worker.process.black_box import BlackBox, black_box
from penstock.worker.process.ipc import Channel, Pulse, WorkerCommand, WorkerEvent
from penstock.worker.process.settings import WorkerSettings

END_S = 2.0  # for a process to end by itself, once its sockets are closed


@dataclass(frozen=True, slots=True)
class Processes:
    """The two processes of a worker, as the supervisor sees them.

    `ended` is done when either process has ended; its result is the exit status. `box` holds what
    they leave behind; None where no crash dump is asked for. `engine_pid` is None where the engine
    is a thread.
    """

    io: Channel[WorkerEvent, WorkerCommand]
    engine: Channel[Pulse, None]
    end: asyncio.Future[int]
    box: BlackBox | None = None
    engine_pid: int | None = None


@asynccontextmanager
async def processes(settings: WorkerSettings) -> AsyncIterator[Processes]:
    """Run the two processes, which end when this one does, in whatever way it ends."""
    io_engine, engine_io = socket.socketpair()
    io_ours, io_theirs = socket.socketpair()
    engine_ours, engine_theirs = socket.socketpair()
    with black_box() if settings.crash_dump_folder else nullcontext() as box:
        with io_engine, engine_io, io_theirs, engine_theirs:
            io_process = await _start(
                "io", "penstock.worker.jobs.service", [io_engine, io_theirs], box
            )
            engine_process = await _start(
                "engine", "penstock.worker.engine_process", [engine_io, engine_theirs], box
            )
        io: Channel[WorkerEvent, WorkerCommand] = await Channel.open(io_ours)
        engine: Channel[Pulse, None] = await Channel.open(engine_ours)
        io.send_text(settings.model_dump_json())
        engine.send_text(settings.model_dump_json())
        waits = [asyncio.create_task(process.wait()) for process in (io_process, engine_process)]
        try:
            yield Processes(io, engine, asyncio.create_task(_first(waits)), box, engine_process.pid)
        finally:
            io.close()
            engine.close()
            await asyncio.wait(waits, timeout=END_S)
            for process in (io_process, engine_process):
                if process.returncode is None:
                    process.kill()
            await asyncio.wait(waits)


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal or a debugger stopped the process. Only Linux tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


async def _start(
    part: str, module: str, ends: Sequence[socket.socket], box: BlackBox | None
) -> asyncio.subprocess.Process:
    numbers = [*(end.fileno() for end in ends), *(box.fds(part) if box else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *map(str, numbers), pass_fds=numbers
    )
    if box is not None:
        box.watch(part, process)
    return process


async def _first(waits: list[asyncio.Task[int]]) -> int:
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
