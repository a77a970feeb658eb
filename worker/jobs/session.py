"""A lease session: a worker's work on all its lanes under one incarnation."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.schemas.delivery import JobSignal
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.servers import Redis
from penstock.worker.engine.io.messages import Load
from penstock.worker.jobs.cache_events import CacheEvents
from penstock.worker.jobs.capacity import Capacity
from penstock.worker.jobs.command_sender import CommandSender
from penstock.worker.jobs.consumer import LOOKS, Consumer, Intake
from penstock.worker.jobs.control import follow_control
from penstock.worker.jobs.job_counts import JobCounts
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.jobs.streamer import Streamer
from penstock.worker.process.ipc import Step
from penstock.worker.process.log import log

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Tracing

_LEAVE_S = 2.0


class Stuck(Exception):
    """Raised when a lane is not read although it should be."""


class LeaseSession:
    """A worker's work on all its lanes under one incarnation.

    It ends when it is cancelled, since its lease was lost or the worker drains. It ends by itself
    when it is stuck: a lane's jobs wait, the engine has room, and nobody reads them.
    """

    def __init__(
        self,
        incarnation: str,
        intake: Intake,
        redis: Redis,
        commands: CommandSender,
        lease: LeaseClock | None = None,
        tracing: "Tracing | None" = None,
        counts: JobCounts | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        settings = intake.settings
        self._redis = redis
        self._cache_events = cache_events
        self._lease_ms = settings.lease_ttl_ms
        self._stuck_after_s = settings.step_timeout_s
        self._limits = intake.limits
        self._commands = commands
        self._load = Load()
        self.lease = lease or LeaseClock(settings.lease_ttl_ms / 1000)
        self._capacity = Capacity(
            intake.limits,
            len(settings.lanes()),
            settings.priority_preemption_threshold,
            commands.are_done,
        )
        queues = [
            WorkerQueue(redis, lane, settings.lease_ttl_ms, settings.orphan_grace_ms)
            for lane in settings.lanes()
        ]
        spans = None
        if tracing:
            from penstock.worker.jobs.job_spans import JobSpans

            spans = JobSpans(tracing, incarnation)
        self._streamers = [
            Streamer(queue, incarnation, self.lease, self._capacity, commands.send, spans, counts)
            for queue in queues
        ]
        self._consumers = [
            Consumer(
                queue, incarnation, self.lease, streamer, intake, self._capacity, self.make_empty
            )
            for queue, streamer in zip(queues, self._streamers, strict=True)
        ]

    async def work(self) -> None:
        """Work until cancelled, or return when the session is stuck."""
        try:
            async with asyncio.TaskGroup() as parts:
                self._begin(parts)
        except* Stuck as stuck:
            log.error("%s; the worker hands back what it has and begins anew", stuck.exceptions[0])

    def _begin(self, parts: asyncio.TaskGroup) -> None:
        channels = [
            streamer.queue.lane.control(streamer.incarnation) for streamer in self._streamers
        ]
        parts.create_task(follow_control(self._redis, channels, self.obey))
        if self._cache_events is not None:  # one cache has one stream: the first lane's
            first = self._streamers[0]
            parts.create_task(
                self._cache_events.publish(first.queue, first.incarnation, self.lease)
            )
        for streamer in self._streamers:
            parts.create_task(streamer.run())
        for consumer in self._consumers:
            parts.create_task(consumer.run())
            parts.create_task(consumer.reap(self._lease_ms))
            parts.create_task(consumer.keep_house(self._lease_ms))
            parts.create_task(self._watch(consumer))

    async def _watch(self, consumer: Consumer) -> None:
        """Raise Stuck when a lane is not read, for no reason that can be seen from outside."""
        while True:
            await asyncio.sleep(self._stuck_after_s / LOOKS)
            is_late = consumer.unread_s() >= self._stuck_after_s
            if is_late and self._could_read() and await consumer.has_waiting_jobs():
                raise Stuck(
                    f"jobs of {consumer.lane.model} wait, the engine has room, and nothing was"
                    f" read for {self._stuck_after_s:g} s"
                )

    def _could_read(self) -> bool:
        """Return whether there is room by the plainest facts.

        Half of the engine is free, no trial is under way, and the lease runs. The engine has done
        what it was told: one that has not may hang, and that is for its supervisor to find out.
        """
        jobs = [job for streamer in self._streamers for job in streamer.jobs.values()]
        num_seqs = sum(job.num_sequences for job in jobs)
        has_room = (
            num_seqs <= self._limits.max_num_seqs // 2
            and self._load.num_held_blocks <= self._limits.num_blocks // 2
        )
        is_tried = any(not job.has_passed_trial for job in jobs)
        return has_room and not is_tried and self._commands.are_done() and self.lease.runs

    def take(self, step: Step) -> None:
        self._load = step.load
        self._capacity.note(step)
        for streamer in self._streamers:
            streamer.take(step.outputs)

    def obey(self, signals: Mapping[str, JobSignal]) -> None:
        for consumer in self._consumers:
            consumer.obey(signals)
        for streamer in self._streamers:
            streamer.obey(signals)

    def is_behind(self) -> bool:
        return any(streamer.is_behind() for streamer in self._streamers)

    def stop_reading(self) -> None:
        for consumer in self._consumers:
            consumer.close()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is read, prepared or in work any more."""
        return not self._capacity.is_used and not any(streamer.jobs for streamer in self._streamers)

    async def hand_back(self) -> None:
        """Hand back all jobs in work to other workers, and those that were being started."""
        for streamer in self._streamers:
            await streamer.hand_back(streamer.stop_all())
        for consumer in self._consumers:
            await consumer.hand_back()

    async def make_empty(self) -> None:
        """Hand back all jobs once the engine has let go of them, so that nothing of theirs is left.

        While the engine hangs in a step of one, they stay this worker's, and if it ends there
        they are blamed.
        """
        pairs = [(streamer, streamer.stop_all()) for streamer in self._streamers]
        await self._capacity.until_settled()
        for streamer, jobs in pairs:
            await streamer.hand_back(jobs)

    async def leave(self) -> None:
        """Hand back jobs as far as the queue answers now; reapers find the others."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.hand_back()
        except TimeoutError:
            log.warning("the queue did not answer: jobs are left to the reapers")

    def drop(self) -> None:
        for streamer in self._streamers:
            streamer.drop()
