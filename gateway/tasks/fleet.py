"""The queues and workers of all models, as operators handle them."""

from dataclasses import dataclass

from penstock.gateway.queue_client import QueueClient
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import JobNotFound, ModelNotFound, PenstockError
from penstock.schemas.model import WorkerOrder
from penstock.schemas.queue.queue import Queue


class WorkerNotFound(JobNotFound):
    code = "worker_not_found"

    def __init__(self, worker: str) -> None:
        PenstockError.__init__(self, f"no worker {worker!r} has a lease", "worker")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pauses and resumes the queue of a model, which is all of its lanes; gives workers orders."""

    client: QueueClient

    async def queues(self) -> list[JsonObject]:
        """Return what each model's queue holds."""
        queues: dict[str, list[Queue]] = {}
        for queue in await self.client.queues():
            queues.setdefault(queue.lane.model, []).append(queue)
        return [await _shown(name, queues[name]) for name in sorted(queues)]

    async def set_paused(self, model: str, is_paused: bool) -> JsonObject:
        """Let no job of a model begin, or let them again. It may be repeated.

        Jobs are accepted all the same, and wait. Raises ModelNotFound.
        """
        queues = await self.client.queues()
        own = [queue for queue in queues if queue.lane.model == model]
        if not own:
            raise ModelNotFound(model, sorted({queue.lane.model for queue in queues}))
        for queue in own:
            await queue.set_paused(is_paused)
        return await _shown(model, own)

    async def tell(self, worker: str, order: WorkerOrder) -> None:
        """Give a worker an order, which it learns of within seconds.

        drain               as SIGTERM does: it takes nothing new, and ends when all is done or
                            handed back
        sleep               the same, but in place of ending it gives the model's memory back
        wake                it loads the model again, and takes jobs
        reset_prefix_cache  it forgets what it has computed for others to go on with

        Raises WorkerNotFound, NotServed.
        """
        answers = [await queue.tell(worker, order) for queue in await self.client.queues()]
        if not any(answers):
            raise WorkerNotFound(worker)

    async def reset_prefix_caches(self) -> list[str]:
        """Let all workers forget what their prefix caches hold; return their names."""
        names = set[str]()
        for queue in await self.client.queues():
            for worker in await queue.workers():
                is_there = worker.lease_left_ms > 0 and worker.card.sleeps
                if is_there and await queue.tell(worker.worker, "reset_prefix_cache"):
                    names.add(worker.worker)
        return sorted(names)


async def _shown(model: str, queues: list[Queue]) -> JsonObject:
    lanes = [await queue.counts() for queue in queues]
    return {
        "model": model,
        "object": "queue",
        "is_paused": any(lane.is_paused for lane in lanes),
        "num_queued": sum(lane.num_queued for lane in lanes),
        "num_running": sum(lane.num_running for lane in lanes),
    }
