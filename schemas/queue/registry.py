"""The registry of served models by name. It is configuration, and outlives every worker."""

from penstock.schemas.keys import MODELS
from penstock.schemas.model import ModelCard
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import read_or_none


class Registry:
    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def register(self, card: ModelCard) -> None:
        await self._connection.call("HSET", MODELS, card.name, card.dump())

    async def forget(self, name: str) -> None:
        await self._connection.call("HDEL", MODELS, name)

    async def restore(self, card: ModelCard) -> None:
        """Write a card back, unless a worker has written one meanwhile."""
        await self._connection.call("HSETNX", MODELS, card.name, card.dump())

    async def cards(self) -> dict[str, ModelCard]:
        """Return the cards that can be read. One that cannot be read is left out."""
        texts = texts_of(await self._connection.call("HVALS", MODELS))
        cards = [card for text in texts if (card := read_or_none(ModelCard, text))]
        return {card.name: card for card in cards}
