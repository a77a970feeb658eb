"""The models that are served, by name. Configuration: it outlives every worker."""

from schemas.connection import Connection, texts_of
from schemas.keys import MODELS
from schemas.model import ModelCard
from schemas.servers import Redis


class Registry:
    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)

    async def register(self, card: ModelCard) -> None:
        await self._connection.call("HSET", MODELS, card.name, card.dump())

    async def forget(self, name: str) -> None:
        await self._connection.call("HDEL", MODELS, name)

    async def cards(self) -> dict[str, ModelCard]:
        pairs = texts_of(await self._connection.call("HVALS", MODELS))
        cards = [ModelCard.model_validate_json(text) for text in pairs]
        return {card.name: card for card in cards}
