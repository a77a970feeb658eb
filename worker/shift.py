"""One shift: a worker's work on all its lanes under one incarnation."""

import asyncio
from collections.abc import Callable, Mapping

from schemas.delivery import Letter
from schemas.servers import Redis
from schemas.worker_queue import WorkerQueue
from worker.consumer import Consumer, Intake
from worker.control import follow_control
from worker.lease import Lease
from worker.link import Order, Step
from worker.log import log
from worker.room import Room
from worker.streamer import Streamer

_LEAVE_S = 2.0


class Shift:
    """Ends when it is cancelled: its lease was lost, or the worker drains."""

    def __init__(
        self, incarnation: str, intake: Intake, redis: Redis, order: Callable[[list[Order]], None]
    ) -> None:
        settings = intake.settings
        self._redis = redis
        self._lease_ms = settings.lease_ttl_ms
        self.lease = Lease(settings.lease_ttl_ms / 1000)
        self._room = Room(
            intake.limits, len(settings.lanes()), settings.priority_preemption_threshold
        )
        self._streamers = [
            Streamer(
                WorkerQueue(redis, lane, settings.lease_ttl_ms, settings.orphan_grace_ms),
                incarnation,
                self.lease,
                self._room,
                order,
            )
            for lane in settings.lanes()
        ]
        self._consumers = [
            Consumer(each, intake, self._room, self.hand_back) for each in self._streamers
        ]

    async def work(self) -> None:
        async with asyncio.TaskGroup() as parts:
            channels = [each.queue.lane.control(each.incarnation) for each in self._streamers]
            parts.create_task(follow_control(self._redis, channels, self.obey))
            for streamer in self._streamers:
                parts.create_task(streamer.run())
            for consumer in self._consumers:
                parts.create_task(consumer.run())
                parts.create_task(consumer.reap(self._lease_ms))
                parts.create_task(consumer.keep_house(self._lease_ms))

    def take(self, step: Step) -> None:
        self._room.note(step)
        for streamer in self._streamers:
            streamer.take(step.outputs)

    def obey(self, letters: Mapping[str, Letter]) -> None:
        for consumer in self._consumers:
            consumer.obey(letters)
        for streamer in self._streamers:
            streamer.obey(letters)

    def is_behind(self) -> bool:
        return any(streamer.is_behind() for streamer in self._streamers)

    def stop_reading(self) -> None:
        for consumer in self._consumers:
            consumer.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is read, prepared or in work any more."""
        return not self._room.is_used and not any(each.jobs for each in self._streamers)

    async def hand_back(self) -> None:
        """All that is in work goes to other workers."""
        for streamer in self._streamers:
            await streamer.hand_back()

    async def leave(self) -> None:
        """Hand back as far as the queue answers now; reapers find what is left."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.hand_back()
        except TimeoutError:
            log.warning("the queue did not answer: jobs are left to the reapers")

    def drop(self) -> None:
        for streamer in self._streamers:
            streamer.drop()
