"""The models that a worker offers: their cards, written where callers look."""

import time

from penstock.schemas.model import ModelCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.servers import Redis
from penstock.worker.process.ipc import Prepared
from penstock.worker.process.settings import WorkerSettings


async def offer(
    redis: Redis, settings: WorkerSettings, preparation: Prepared, fingerprint: str
) -> None:
    """Write the model's card under each served name. Raises Unavailable."""
    registry = Registry(redis)
    for name in settings.names:
        card = ModelCard(
            name=name,
            lanes=settings.num_lanes,
            max_model_len=preparation.limits.max_model_len,
            created_s=int(time.time()),
            fingerprint=fingerprint,
            features={
                "chat": preparation.has_chat_template,
                "task": preparation.limits.tasks[0],
                "numerics": preparation.limits.numerics,
            },
        )
        await registry.register(card)
