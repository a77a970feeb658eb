"""The supervisor of a worker: it starts the processes, renews the lease, restarts and drains.

To drain is a graceful shutdown: nothing new is taken, and what runs is finished or handed back.
"""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

from pydantic import JsonValue

from penstock.schemas.errors import Unavailable
from penstock.schemas.model import WorkerCard, WorkerOrder
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.time_awake import TimeAwake
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.server_check import UnfitServer, check_servers
from penstock.schemas.redis.servers import Redis
from penstock.worker.engine.io.messages import ResetPrefixCache, Sleep, Wake
from penstock.worker.process.fingerprint import fingerprint
from penstock.worker.process.ipc import (
    Alive,
    BeginSession,
    Closed,
    Drain,
    Drained,
    EndSession,
    Prepared,
    Pulse,
    WorkerCommand,
)
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings, pulse_every_s
from penstock.worker.supervisor.crash_dump import keep_dump
from penstock.worker.supervisor.offer import offer
from penstock.worker.supervisor.processes import Processes, is_stopped, processes
from penstock.worker.supervisor.renewal import Renewal

_RESTART_FIRST_S, _RESTART_MOST_S = 0.2, 10.0
_REDIS_RETRY_S = 0.5
_DRAIN_GRACE_S = 5.0  # past the time to drain, for handing back
_UNREGISTER_S = 2.0
_TICK_S = 0.1


class Supervisor:
    """One worker, from start to end."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._drains = asyncio.Event()
        self._hurries = asyncio.Event()

    def drain(self) -> None:
        """End the worker in order; when called again, hand back its jobs at once."""
        (self._hurries if self._drains.is_set() else self._drains).set()

    async def run(self) -> int:
        """Run until the worker is drained or can never start; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        start = _starter(self._settings.in_process)
        pause_s = _RESTART_FIRST_S
        async with connect(self._settings.redis_url) as redis:
            while not self._drains.is_set():
                async with start(self._settings) as processes:
                    watch = Watchdog(self._settings, processes, redis, self._drains, self._hurries)
                    status = await watch.run()
                    await watch.unregister(crashed=status is None)
                    if status is None:
                        await watch.leave_dump()
                if status is not None:
                    return status
                pause_s = _RESTART_FIRST_S if watch.was_prepared else pause_s
                log.error("worker's processes ended; starting them again in %.1f s", pause_s)
                await asyncio.wait([asyncio.ensure_future(self._drains.wait())], timeout=pause_s)
                pause_s = min(pause_s * 2, _RESTART_MOST_S)
        return 0


def _starter(
    in_process: bool,
) -> Callable[[WorkerSettings], AbstractAsyncContextManager[Processes]]:
    if not in_process:
        return processes
    from penstock.worker.supervisor.in_process import (
        threads,  # loads what the processes load for themselves
    )

    return threads


class Watchdog:
    """The watch over a worker's two processes, from their start to their end.

    Their lease is renewed while the engine and the I/O side move.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        processes: Processes,
        redis: Redis,
        drains: asyncio.Event,
        hurries: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._lease_s = settings.lease_ttl_ms / 1000
        self._renew_every_s = pulse_every_s(settings)
        self._processes = processes
        self._drains = drains
        self._hurries = hurries
        self._redis = redis
        self._is_checked = False
        self._queues = [
            WorkerQueue(redis, lane, settings.lease_ttl_ms) for lane in settings.lanes()
        ]
        self._incarnation: str | None = None
        self._why = "a process ended"
        self._records: dict[str, JsonValue] = {}
        self._pulse: Pulse | None = None
        self._alive = Alive()
        self._awake = TimeAwake(_TICK_S)  # the clock by which the other processes are judged
        self._heard_s = 0.0
        self._io_heard_s = 0.0
        loop = asyncio.get_running_loop()
        self._preparation: asyncio.Future[Prepared] = loop.create_future()
        self._over: asyncio.Future[int | None] = loop.create_future()
        self._card = WorkerCard(
            model=settings.names[0],
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("penstock"),
            cache_config=settings.cache_config(),
            sleeps=settings.engine == "native",
        )

    @property
    def was_prepared(self) -> bool:
        return self._preparation.done()

    async def run(self) -> int | None:
        """Return the exit status; None if the processes died and are to be started again."""
        async with asyncio.TaskGroup() as parts:
            tasks = [
                parts.create_task(part)
                for part in (
                    self._stay_awake(),
                    self._follow_io(),
                    self._follow_engine(),
                    self._follow_end(),
                    self._keep_lease(parts),
                    self._keep_drain(),
                )
            ]
            status = await self._over
            if status is None:
                self._records = self._processes.box.records() if self._processes.box else {}
                self._forsake()
            for task in tasks:
                task.cancel()
        return status

    async def unregister(self, crashed: bool) -> None:
        """Give the jobs that the worker still holds to others now, not when its lease lapses."""
        if self._incarnation is None:
            return
        calls = (queue.unregister(self._incarnation, crashed) for queue in self._queues)
        try:
            async with asyncio.timeout(_UNREGISTER_S):
                await _all(calls)
        except (Unavailable, TimeoutError):
            log.warning("worker %s was left to the reapers", self._incarnation)

    async def leave_dump(self) -> None:
        """Write the crash dump, before the processes that still run are killed."""
        box = self._processes.box
        if box is None:
            return
        record: dict[str, JsonValue] = {
            "why": self._why,
            "card": self._card.model_dump(mode="json"),
            "stats": asdict(self._pulse.stats) if self._pulse else None,
            **await box.remains(),
            **self._records,
        }
        name = self._incarnation or f"{self._card.host}-{self._card.pid}-{secrets.token_hex(4)}"
        await keep_dump(self._settings, name, record)

    def _forsake(self) -> None:
        """End the session so that the I/O side hands nothing back.

        The supervisor alone tells the queue of a crash.
        """
        self._tell(EndSession())

    def _tell(self, instruction: WorkerCommand) -> None:
        with suppress(Closed):  # `_follow_end` sees it too, and ends all
            self._processes.io.send(instruction)

    def _end(self, status: int | None) -> None:
        if not self._over.done():
            self._over.set_result(status)

    async def _stay_awake(self) -> None:
        while True:
            self._awake.now()
            await asyncio.sleep(_TICK_S)

    async def _follow_io(self) -> None:
        async for notice in self._processes.io.received():
            self._io_heard_s = self._awake.now()
            match notice:
                case Alive() as alive:
                    self._alive = alive
                case Prepared() as preparation:
                    self._preparation.set_result(preparation)
                case Drained():
                    log.info("worker was drained")
                    self._end(0)

    async def _follow_engine(self) -> None:
        async for pulse in self._processes.engine.received():
            self._pulse, self._heard_s = pulse, self._awake.now()

    async def _follow_end(self) -> None:
        status = await self._processes.end
        self._end(status if status == NEVER_STARTS else None)

    async def _keep_drain(self) -> None:
        await self._drains.wait()
        if not self._preparation.done():
            self._end(0)
            return
        drain_s = self._settings.drain_s
        log.info("worker began to drain, for at most %g s", drain_s)
        self._tell(Drain(drain_s))
        self._card = self._card.model_copy(update={"draining": True})
        async with asyncio.TaskGroup() as parts:
            if self._incarnation is not None:
                parts.create_task(self._show_card(self._incarnation))
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._hurries.wait()
            self._tell(Drain(0))
            await asyncio.sleep(_DRAIN_GRACE_S)  # for Drained
            self._end(0)

    def _obey(self, parts: asyncio.TaskGroup, order: WorkerOrder) -> None:
        """Obey an operator's order. One that changes nothing is obeyed already."""
        is_asleep = order == "sleep"
        if order == "drain":
            self._drains.set()
        elif order == "reset_prefix_cache":
            self._tell(ResetPrefixCache())
        elif self._incarnation is not None and self._card.asleep != is_asleep:
            log.info("worker was told to %s", order)
            self._tell(Sleep(self._settings.drain_s) if is_asleep else Wake())
            self._card = self._card.model_copy(update={"asleep": is_asleep})
            parts.create_task(self._show_card(self._incarnation))

    async def _show_card(self, incarnation: str) -> None:
        """Show in Redis what has become of the worker; try for as long as its lease can run.

        A worker without a lease is not counted by anybody.
        """
        try:
            async with asyncio.timeout(self._lease_s):
                while True:
                    with suppress(Unavailable):
                        return await self._register(incarnation)
                    await asyncio.sleep(_REDIS_RETRY_S)
        except TimeoutError:
            log.warning("Redis could not be told what became of worker %s", incarnation)

    async def _keep_lease(self, parts: asyncio.TaskGroup) -> None:
        """Hold one lease after another, each under a new incarnation.

        A name whose lease was lost is never used again. None begins while the worker drains, since
        it would start jobs.
        """
        preparation = await asyncio.shield(self._preparation)  # a cancelled wait leaves it as it is
        card_digest = await asyncio.to_thread(fingerprint, self._settings)
        limits = preparation.limits
        self._card = self._card.model_copy(
            update={
                "fingerprint": card_digest,
                "max_num_seqs": limits.max_num_seqs,
                "resumes": limits.resumes,
            }
        )
        while not self._drains.is_set():
            incarnation = f"{self._card.host}-{self._card.pid}-{secrets.token_hex(4)}"
            await self._register_when_possible(incarnation, preparation)
            self._incarnation = incarnation
            self._tell(BeginSession(incarnation))
            log.info("worker %s started serving %s", incarnation, ", ".join(self._settings.names))
            renewal = Renewal(
                self._queues,
                self._lease_s,
                self._renew_every_s,
                self._is_alive,
                self._stats,
                self._tell,
                partial(self._obey, parts),
            )
            await renewal.run(incarnation)
            self._tell(EndSession())
            log.warning("worker %s lost its lease and dropped what it had in work", incarnation)

    async def _register_when_possible(self, incarnation: str, preparation: Prepared) -> None:
        """Take the lease and then show the models' cards, once Redis answers.

        The lease comes first, since a caller who finds a model may ask for it at once. The cards
        are written again with each lease, since Redis may have come back with nothing.
        """
        is_told = False
        while True:
            try:
                if self._is_alive():
                    await self._check_server()
                    await self._register(incarnation)
                    await offer(self._redis, self._settings, preparation, self._card.fingerprint)
                    return
            except (Unavailable, TimeoutError) as error:
                if not is_told:
                    log.warning("Redis could not be reached, trying again: %s", error)
                is_told = True
            await asyncio.sleep(min(_REDIS_RETRY_S, self._renew_every_s))

    async def _check_server(self) -> None:
        """Check the Redis servers once; end for good if one cannot keep the queue's promises."""
        if self._is_checked:
            return
        try:
            for warning in await check_servers(self._redis):
                log.warning("%s", warning)
        except UnfitServer as error:
            log.error("%s", error)
            self._end(NEVER_STARTS)
            await asyncio.Event().wait()  # for the cancellation that comes with the end
        self._is_checked = True

    async def _register(self, incarnation: str) -> None:
        async with asyncio.timeout(self._lease_s):
            await _all(queue.register(incarnation, self._card) for queue in self._queues)

    def _stats(self, model: str) -> dict[str, JsonValue] | None:
        """Return the engine's numbers, and those of one model's jobs."""
        if self._pulse is None:
            return None
        unmoved_s = self._engine_unmoved_s(self._pulse)
        stats, alive = self._pulse.stats, self._alive
        dumps = stats.histograms | alive.histograms
        histograms: dict[str, JsonValue] = {stat: [*dump] for stat, dump in dumps.items()}
        own = {"histograms": histograms, "unmoved_s": unmoved_s, "model": alive.models.get(model)}
        return asdict(stats) | alive.counts | own

    def _engine_unmoved_s(self, pulse: Pulse) -> float:
        return pulse.unmoved_s + self._awake.now() - self._heard_s

    def _is_alive(self) -> bool:
        """Return whether both sides move; end processes that do not, to hand on their jobs.

        A step may be long, but an event loop always turns. While the I/O side's loop is silent for
        half a lease, the lease is not renewed, so its jobs are handed on when it lapses. The same
        holds of an engine that is silent because somebody stopped its process.
        """
        if self._pulse is None:
            return False
        engine_s = self._engine_unmoved_s(self._pulse)
        now_s, silent_s = self._awake.now(), self._lease_s / 2
        io_s = now_s - self._io_heard_s
        for name, seconds in (("engine", engine_s), ("I/O process", io_s)):
            if seconds > self._settings.step_timeout_s:
                self._why = f"{name} did not move for {seconds:.1f} s"
                log.error("%s; it is ended", self._why)
                self._end(None)
        if now_s - self._heard_s > silent_s and is_stopped(self._processes.engine_pid):
            return False
        return engine_s <= self._settings.step_timeout_s and io_s <= silent_s


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all calls side by side, each to its end; then raise the first failure."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if outcome is not None:
            raise outcome
