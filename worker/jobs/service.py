"""The I/O process of a worker: jobs in, sequences to the engine, deltas out."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from penstock.schemas.errors import PenstockError
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.parent import end_with_parent
from penstock.schemas.process.start import keep_what_is_loaded, write_log_to_stderr
from penstock.schemas.process.tracing import tracing
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.servers import Redis
from penstock.worker.engine.io.messages import ResetPrefixCache, Sleep, Wake
from penstock.worker.jobs.cache_events import CacheEvents
from penstock.worker.jobs.command_sender import CommandSender
from penstock.worker.jobs.consumer import Intake
from penstock.worker.jobs.job_counts import JobCounts
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.jobs.session import LeaseSession
from penstock.worker.process.black_box import leave_stacks
from penstock.worker.process.ipc import (
    Alive,
    BeginSession,
    Channel,
    Closed,
    Drain,
    Drained,
    EndSession,
    EngineCommand,
    EngineEvent,
    Pause,
    Prepared,
    Ready,
    Renewed,
    Resume,
    Signals,
    Step,
    WorkerCommand,
    WorkerEvent,
    receive_text,
)
from penstock.worker.process.log import log
from penstock.worker.process.sampling_defaults import Generation, load_generation
from penstock.worker.process.settings import WorkerSettings, pulse_every_s
from penstock.worker.text.model_tokenizer import ModelTokenizer, load_tokenizer

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Tracing

_LOOK_S = 0.01


class EngineGone(Exception):
    """Raised when the engine ended.

    The supervisor then hands on the jobs that it had in work, and blames them for its end.
    """


class Service:
    """The I/O side: one lease session after another with one engine, as the supervisor says."""

    def __init__(
        self,
        settings: WorkerSettings,
        text: ModelTokenizer,
        generation: Generation,
        redis: Redis,
        engine: Channel[EngineEvent, list[EngineCommand]],
        supervisor: Channel[WorkerCommand, WorkerEvent],
        tracing: "Tracing | None" = None,
        counts: JobCounts | None = None,
    ) -> None:
        self._settings = settings
        self._text = text
        self._generation = generation
        self._redis = redis
        self._engine = engine
        self._commands = CommandSender(engine)
        self._supervisor = supervisor
        self._tracing = tracing
        self._counts = counts
        self._cache_events: CacheEvents | None = None
        self._session: LeaseSession | None = None
        self._work: asyncio.Task[None] | None = None
        self._drain_ends_s: float | None = None
        self._is_paused = False
        self._begin: Callable[[], Coroutine[None, None, None]] | None = None  # work, under a lease
        self._is_asleep = False
        self._turn = asyncio.Lock()  # one at a time: falling asleep, waking, draining

    async def run(self) -> None:
        """Work until the supervisor closes; then hand back what is in work.

        Raises EngineGone when the engine ends.
        """
        happenings = self._engine.received()
        ready = await anext(happenings, None)
        if not isinstance(ready, Ready):
            raise EngineGone
        self._supervisor.send(Prepared(ready.limits, self._text.has_chat_template))
        generation = self._generation.without(ready.limits.unsupported_fields)
        intake = Intake(self._settings, self._text, ready.limits, generation)
        if config := self._settings.kv_events:
            self._cache_events = CacheEvents(ready.limits.block_size, config.buffer_steps)
        is_gone = False
        try:
            async with asyncio.TaskGroup() as parts:
                follow = parts.create_task(self._follow_engine(happenings, parts))
                await self._follow_supervisor(intake, parts)
                await self._hand_back()
                follow.cancel()
        except* EngineGone:
            is_gone = True
        if is_gone:
            await self._end_shift()
            raise EngineGone

    async def _follow_engine(
        self, happenings: AsyncIterator[EngineEvent], parts: asyncio.TaskGroup
    ) -> None:
        async for step in happenings:
            if isinstance(step, Step):
                self._commands.note(step)
                if self._cache_events is not None:
                    self._cache_events.take(step.changes)
            if isinstance(step, Step) and self._session:
                self._session.take(step)
                if self._session.is_behind() and not self._is_paused:
                    self._is_paused = True
                    self._commands.send([Pause()])
                    parts.create_task(self._resume_when_caught_up())
        raise EngineGone

    async def _resume_when_caught_up(self) -> None:
        log.warning("engine was paused: the queue is behind")
        await _until(lambda: not (self._session and self._session.is_behind()))
        self._is_paused = False
        self._commands.send([Resume()])

    async def _follow_supervisor(self, intake: Intake, parts: asyncio.TaskGroup) -> None:
        async for instruction in self._supervisor.received():
            match instruction:
                case BeginSession(incarnation):
                    await self._end_shift()
                    self._begin = partial(self._work_as, incarnation, intake)
                    if not self._is_asleep:
                        self._work = parts.create_task(self._begin())
                case Renewed(began_s) if self._session:
                    self._session.lease.renew(began_s)
                case EndSession():
                    self._begin = None
                    await self._end_shift()
                case ResetPrefixCache() as order:
                    self._commands.send([order])
                case Sleep(seconds):
                    parts.create_task(self._fall_asleep(seconds))
                case Wake():
                    parts.create_task(self._awake(parts))
                case Signals(job_signals) if self._session:
                    self._session.obey(job_signals)
                case Drain(seconds):
                    is_first = self._drain_ends_s is None
                    self._drain_ends_s = time.monotonic() + seconds
                    if is_first:
                        parts.create_task(self._drain())

    async def _work_as(self, incarnation: str, intake: Intake) -> None:
        """Work in one lease session after another, until cancelled.

        The next session begins when one is stuck.
        """
        lease: LeaseClock | None = None
        while True:
            self._session = LeaseSession(
                incarnation,
                intake,
                self._redis,
                self._commands,
                lease,
                self._tracing,
                self._counts,
                self._cache_events,
            )
            lease = self._session.lease
            await self._session.work()
            await self._session.leave()

    async def _fall_asleep(self, seconds: float) -> None:
        """Finish within so many seconds, or until woken, and let the engine sleep."""
        self._is_asleep, until_s = True, time.monotonic() + seconds
        async with self._turn:
            await self._wind_up(lambda: not self._is_asleep or time.monotonic() >= until_s)
            self._commands.send([Sleep()])

    async def _awake(self, parts: asyncio.TaskGroup) -> None:
        self._is_asleep = False
        async with self._turn:
            self._commands.send([Wake()])
            if self._begin is not None and self._work is None and self._drain_ends_s is None:
                self._work = parts.create_task(self._begin())

    async def _drain(self) -> None:
        """Finish, for as long as the latest instruction allows."""
        async with self._turn:
            await self._wind_up(lambda: False)
        self._supervisor.send(Drained())

    async def _wind_up(self, is_enough: Callable[[], bool]) -> None:
        """Take nothing new, decode on until all is done or it is enough, and hand back the rest.

        A drain whose time is up ends it in any case.
        """
        if self._session:
            self._session.stop_reading()
        await _until(
            lambda: not self._session or self._session.is_empty or is_enough() or self._is_time_up()
        )
        await self._hand_back()

    def _is_time_up(self) -> bool:
        return self._drain_ends_s is not None and time.monotonic() >= self._drain_ends_s

    async def _hand_back(self) -> None:
        """Hand back all jobs to other workers, with what is logged of them."""
        session = self._session
        await self._stop_work()
        if session:
            await session.leave()
            self._session = None

    async def _end_shift(self) -> None:
        """End the session and drop its jobs: without the lease nothing may be written for them."""
        await self._stop_work()
        if self._session:
            self._session.drop()
            self._session = None

    async def _stop_work(self) -> None:
        if self._work:
            self._work.cancel()
            await asyncio.wait([self._work])
            self._work = None


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait until the condition holds, by polling: what it depends on changes in many places."""
    while not is_so():
        await asyncio.sleep(_LOOK_S)


async def _beat(
    supervisor: Channel[WorkerCommand, WorkerEvent], every_s: float, counts: JobCounts
) -> None:
    with suppress(Closed):
        while True:
            supervisor.send(Alive(counts.dump(), counts.histograms(), counts.models()))
            await asyncio.sleep(every_s)


async def serve(settings: WorkerSettings, engine: socket.socket, supervisor: socket.socket) -> None:
    """Run the I/O side, with its sockets to the engine and to the supervisor."""
    text = await asyncio.to_thread(load_tokenizer, settings)
    generation = await asyncio.to_thread(load_generation, settings)
    engine_wire: Channel[EngineEvent, list[EngineCommand]] = await Channel.open(engine)
    supervisor_wire: Channel[WorkerCommand, WorkerEvent] = await Channel.open(supervisor)
    counts = JobCounts(settings.metrics_max_tenants, settings.names)
    pulse = asyncio.create_task(_beat(supervisor_wire, pulse_every_s(settings), counts))
    spans = await asyncio.to_thread(tracing, settings, "penstock-worker")
    async with connect(settings.redis_url) as redis:
        try:
            keep_what_is_loaded()
            service = Service(
                settings, text, generation, redis, engine_wire, supervisor_wire, spans, counts
            )
            await service.run()
        finally:
            pulse.cancel()
            engine_wire.close()
            supervisor_wire.close()
            if spans:
                await asyncio.to_thread(spans.close)


def main() -> None:
    """Run the I/O process, as the supervisor starts it.

    The arguments are the numbers of two sockets, to the engine and to the supervisor, and perhaps
    of a file for this process's stacks.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor, which ends this in order
    engine, supervisor = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    settings = WorkerSettings.model_validate_json(receive_text(supervisor))
    write_log_to_stderr("io", settings, log)
    for stacks in sys.argv[3:]:
        leave_stacks(int(stacks))
    try:
        uvloop.run(serve(settings, engine, supervisor))
    except PenstockError as error:
        log.error("worker cannot start: %s", error.message)
        sys.exit(NEVER_STARTS)
    except (EngineGone, Closed):
        log.warning("engine or supervisor was gone; this process ended")
        sys.exit(1)


if __name__ == "__main__":
    main()
