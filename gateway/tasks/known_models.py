"""The list of models as operators handle it: what stands on it, and what leaves it.

A model is listed by its workers and stays when they go, so that jobs can wait for others. It leaves
when an operator removes it, or when nobody used it for long.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.gateway.follow.lanes import CARDS_S
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.errors import ModelInUse, ModelNotFound, PenstockError
from penstock.schemas.keys import CHORES
from penstock.schemas.queue.queue import LaneUse, Queue
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import Connection, texts_of

UNUSED_SINCE = f"{CHORES}models_unused"  # hash: name -> since when, in unix milliseconds
DAY_MS = 86_400_000
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownModels:
    """The models that have a card, and the end of those that nobody uses."""

    client: QueueClient

    async def remove(self, name: str) -> None:
        """Take a model from the list, with its dead letters and what is left of its lanes.

        Raises ModelNotFound, and ModelInUse while a worker serves it or jobs of it have not ended.
        """
        models = await self._queues()
        if name not in models:
            raise ModelNotFound(name, list(models))
        use = await self._use(models[name])
        if not use.is_held and await self._forget(name, models[name]):
            return
        use = await self._use(models[name])
        raise ModelInUse(name, use.num_workers, use.num_jobs + use.num_to_hand_on)

    async def forget_unused(self, kept_days: float) -> list[str]:
        """Forget the models that had no worker and no job for so long, kept ones included.

        Returns their names. A model that cannot be looked at now is left for later.
        """
        models, since = await self._queues(), await self._unused_since()
        for name in since.keys() - models.keys():
            await self._unmark(name)
        names = []
        for name, queues in models.items():
            try:
                if await self._is_over(name, queues, since.get(name), kept_days):
                    names += [name] if await self._forget(name, queues) else []
            except PenstockError as error:
                log.warning("model %s was left for later: %s", name, error.message)
        return names

    async def _is_over(
        self, name: str, queues: Sequence[Queue], since_ms: int | None, kept_days: float
    ) -> bool:
        """Note since when a model is unused, and return whether that is long enough."""
        use, now_ms = await self._use(queues), int(time.time() * 1000)
        if use.is_held or use.num_dead_letters:
            await self._unmark(name)
            return False
        if since_ms is not None and now_ms - since_ms < kept_days * DAY_MS:
            return False
        if since_ms is not None and not await self._keeps_jobs(queues):
            return True
        await Connection(self.client.redis).call("HSET", UNUSED_SINCE, name, now_ms)
        return False

    async def _keeps_jobs(self, queues: Sequence[Queue]) -> bool:
        return any([await queue.keeps_jobs() for queue in queues])

    async def _forget(self, name: str, queues: Sequence[Queue]) -> bool:
        """Forget a model; put it back and return False if it comes into use meanwhile.

        Whoever has the list may submit jobs for as long as it is thought to be new.
        """
        registry, card = Registry(self.client.redis), (await self.client.models()).get(name)
        await registry.forget(name)
        await asyncio.sleep(2 * CARDS_S)
        are_gone = [await queue.drop_lane() for queue in queues]
        if not all(are_gone):
            if card is not None:
                await registry.restore(card)
            return False
        await self._unmark(name)
        log.info("model %s is in no use, and was forgotten", name)
        return True

    async def _use(self, queues: Sequence[Queue]) -> LaneUse:
        uses = [await queue.use() for queue in queues]
        return LaneUse(*map(sum, zip(*uses, strict=True)))

    async def _queues(self) -> dict[str, list[Queue]]:
        models: dict[str, list[Queue]] = {}
        for queue in await self.client.queues():
            models.setdefault(queue.lane.model, []).append(queue)
        return models

    async def _unused_since(self) -> Mapping[str, int]:
        reply = texts_of(await Connection(self.client.redis).call("HGETALL", UNUSED_SINCE))
        texts = [text.decode() for text in reply]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return {name: int(since) for name, since in pairs if since.isdigit()}

    async def _unmark(self, name: str) -> None:
        await Connection(self.client.redis).call("HDEL", UNUSED_SINCE, name)
