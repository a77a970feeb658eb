"""The I/O side and the engine within the supervisor's own process, for tests and debugging."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.schemas.errors import PenstockError
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.worker.engine_process import EngineLoop
from penstock.worker.jobs.service import EngineGone, serve
from penstock.worker.process.ipc import BlockingWire, Channel, Pulse, WorkerCommand, WorkerEvent
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings, pulse_every_s
from penstock.worker.sleeper import sleeping_engine
from penstock.worker.supervisor.processes import END_S, Processes


@asynccontextmanager
async def threads(settings: WorkerSettings) -> AsyncIterator[Processes]:
    """Run the I/O side as a task and the engine as a thread."""
    io_engine, engine_io = socket.socketpair()
    io_ours, io_theirs = socket.socketpair()
    engine_ours, engine_theirs = socket.socketpair()
    sleeper = await asyncio.to_thread(sleeping_engine, settings)
    loop = EngineLoop(
        sleeper,
        BlockingWire(engine_io),
        BlockingWire(engine_theirs),
        pulse_every_s(settings),
        kv_events=settings.kv_events,
    )
    thread = threading.Thread(target=loop.run, name="engine", daemon=True)
    thread.start()
    io: Channel[WorkerEvent, WorkerCommand] = await Channel.open(io_ours)
    engine: Channel[Pulse, None] = await Channel.open(engine_ours)
    work = asyncio.create_task(serve(settings, io_engine, io_theirs))
    try:
        yield Processes(io, engine, asyncio.create_task(_status(work)))
    finally:
        io.close()
        await asyncio.wait([work], timeout=END_S)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        engine.close()
        await asyncio.to_thread(thread.join, END_S)
        for end in (engine_io, engine_theirs):
            end.close()


async def _status(work: asyncio.Task[None]) -> int:
    try:
        await asyncio.shield(work)
    except EngineGone:
        return 1
    except PenstockError as error:
        log.error("worker cannot start: %s", error.message)
        return NEVER_STARTS
    return 0
