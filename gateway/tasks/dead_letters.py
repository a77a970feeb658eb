"""The dead-letter queue (DLQ) of all lanes: jobs that were given up, for commands and routes."""

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.delivery import DeadLetter, Outcome
from penstock.schemas.errors import JobNotFound, QueueFull
from penstock.schemas.job import Job
from penstock.schemas.keys import lane_label
from penstock.schemas.queue.queue import Queue


class DeadLetters:
    def __init__(self, client: QueueClient) -> None:
        self._client = client

    async def newest(self, most: int) -> tuple[list[DeadLetter], int]:
        """Return the newest letters of each lane, the newest first, and how many were dropped."""
        letters, num_dropped = list[DeadLetter](), 0
        for queue in await self._client.queues():
            lane_letters, count = await queue.dead_letters(most)
            letters += lane_letters
            num_dropped += count
        return sorted(letters, key=lambda letter: -letter.died_ms), num_dropped

    async def get(self, job_id: str) -> tuple[DeadLetter, Job | None]:
        """Return a letter, and its job, None if that was not kept. Raises JobNotFound."""
        return await (await self._queue(job_id)).dead_letter(job_id)

    async def requeue(self, job_id: str) -> str:
        """Submit a job again. Return its new id, which follows from its own.

        Raises JobNotFound, JobGone, QueueFull.
        """
        queue = await self._queue(job_id)
        letter, _ = await queue.dead_letter(job_id)
        submission = await queue.requeue_dead(job_id)
        if submission.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            raise QueueFull(
                f"the queue refused it: {submission.outcome}; try again later",
                retry_after_ms=submission.retry_after_ms,
            )
        return queue.successor(job_id, letter.tenant)

    async def drop(self, job_id: str) -> None:
        """Delete a letter, and the request that is kept with it. Raises JobNotFound."""
        if not await (await self._queue(job_id)).drop_dead(job_id):
            raise JobNotFound(job_id)

    async def _queue(self, job_id: str) -> Queue:
        """Return the queue of the lane that an id names. Raises JobNotFound."""
        label = lane_label(job_id)
        queues = [queue for queue in await self._client.queues() if queue.lane.label == label]
        if not queues:
            raise JobNotFound(job_id)
        return queues[0]
