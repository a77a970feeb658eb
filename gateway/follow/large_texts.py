"""Large texts of what is stored: not in Redis, but where gateways find them."""

from typing import Protocol

from penstock.schemas.errors import PenstockError, Unavailable

LARGE_BYTES = 65_536  # a text of more is moved to disk


class TextLost(PenstockError):
    """Raised where Redis says that a text is on disk, and it is not."""

    code, status = "text_lost", 410

    def __init__(self, name: str) -> None:
        super().__init__(f"what was stored as {name} is on disk no longer")


class TextElsewhere(Unavailable):
    """Raised in a process that is not told where the texts are."""

    code, status = "text_elsewhere", 503

    def __init__(self, name: str) -> None:
        where = "give --files-folder and --files-url as the gateways have them"
        super().__init__(f"what was stored as {name} is on disk, which is unknown here; {where}")


class Texts(Protocol):
    """Texts by name: a job's id for what it asks, or a conversation's with a suffix of its own."""

    async def put(self, name: str, text: bytes) -> None:
        """Write a text, which is on disk when this returns. It may be repeated.

        Raises Unavailable, OSError.
        """

    async def text(self, name: str) -> bytes:
        """Return a text. Raises TextLost, Unavailable."""

    async def delete(self, name: str) -> None:
        """Delete a text, if it is there. Raises Unavailable."""


async def text_of(texts: Texts | None, name: str) -> bytes:
    """Return a text. Raises TextElsewhere where there are none, TextLost, Unavailable."""
    if texts is None:
        raise TextElsewhere(name)
    return await texts.text(name)
