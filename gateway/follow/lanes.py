"""A client's list of the served models, their lanes, and the queue of each lane."""

import time
from collections.abc import Mapping

from penstock.schemas.account import Account
from penstock.schemas.errors import InvalidJob, JobNotFound, ModelNotFound
from penstock.schemas.keys import Lane, lane_label
from penstock.schemas.model import ModelCard
from penstock.schemas.queue.queue import Queue
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.servers import Redis

CARDS_S = 1.0  # how old the list of models may be, in seconds


def only(cards: Mapping[str, ModelCard]) -> str:
    """Return the one model that is served. Raises InvalidJob where there are none or several."""
    if len(cards) != 1:
        names = ", ".join(sorted(cards)) or "none at present"
        raise InvalidJob(f"model: give one; served: {names}", "model")
    return next(iter(cards))


class Lanes:
    """The served models and their lanes, read from Redis.

    They are read again when they are old, or lack what is asked for.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._registry = Registry(redis)
        self._cards: dict[str, ModelCard] = {}
        self._cards_until = 0.0
        self._queues: dict[str, Queue] = {}

    async def models(self) -> dict[str, ModelCard]:
        """Return the served models' cards by name. One that is new is missing for a second."""
        if not self._cards or time.monotonic() >= self._cards_until:
            await self._refresh()
        return self._cards

    async def model(self, name: str) -> ModelCard:
        """Return a model's card.

        Raises ModelNotFound, but only after Redis was asked: the model may be new there.
        """
        if name not in await self.models():
            await self._refresh()
        if name not in self._cards:
            raise ModelNotFound(name, list(self._cards))
        return self._cards[name]

    async def only_model(self) -> str:
        """Return the name of the only served model. Raises InvalidJob if there is not just one."""
        return only(await self.models())

    async def queues(self) -> list[Queue]:
        """Return the queue of every lane of every model, to read their counts and workers."""
        cards = (await self.models()).values()
        lanes = [card.lane(number) for card in cards for number in range(card.lanes)]
        return [self._queues[lane.label] for lane in lanes]

    async def queue(self, job_id: str) -> Queue:
        """Return the queue of the lane that a job's id names. Raises JobNotFound."""
        label = lane_label(job_id)
        if label is not None and label not in self._queues:
            await self._refresh()
        if label is None or label not in self._queues:
            raise JobNotFound(job_id)
        return self._queues[label]

    def share(self, lane: Lane, account: Account | None) -> Account | None:
        """Return the account with this lane's share of its limits."""
        if account is None:
            return None
        lanes = self.number(lane.model)
        return Account(name=account.name, limits=account.limits.share(lanes, lane.number))

    def number(self, model: str) -> int:
        """Return the number of a model's lanes, or 1 if the model is not known here."""
        card = self._cards.get(model)
        return card.lanes if card else 1

    def max_model_len(self, model: str) -> int | None:
        """Return the most tokens of a prompt with its answer. None means not known here."""
        card = self._cards.get(model)
        return card.max_model_len if card else None

    async def _refresh(self) -> None:
        self._cards = await self._registry.cards()
        self._cards_until = time.monotonic() + CARDS_S
        items = self._queues.items()
        self._queues = {label: queue for label, queue in items if queue.lane.model in self._cards}
        for card in self._cards.values():
            for number in range(card.lanes):
                lane = card.lane(number)
                self._queues.setdefault(lane.label, Queue(self._redis, lane))
