"""Large texts of what is stored, on disk beside the files. Redis has a short word in their place.

A text is on disk before Redis says so, and Redis forgets it before it is deleted. So what is left
over is known to nobody, and is swept with the files.
"""

import asyncio
import os
import secrets
from pathlib import Path

from penstock.gateway.files.storage import FileStorage, discarded
from penstock.gateway.follow.large_texts import TextLost


class DiskTexts:
    """The texts, each a file in the storage of files."""

    def __init__(self, storage: FileStorage, folder: Path) -> None:
        self._storage = storage
        self._folder = folder

    async def put(self, name: str, text: bytes) -> None:
        with discarded(self._folder / f".{secrets.token_hex(16)}.part") as part:
            await asyncio.to_thread(_write, part, text)
            await self._storage.put(part, name)

    async def text(self, name: str) -> bytes:
        try:
            content = await self._storage.content(name)
            if isinstance(content, Path):
                return await asyncio.to_thread(content.read_bytes)
            return b"".join([piece async for piece in content])
        except FileNotFoundError:
            raise TextLost(name) from None

    async def delete(self, name: str) -> None:
        await self._storage.delete(name)


def _write(path: Path, text: bytes) -> None:
    with path.open("wb") as sink:
        sink.write(text)
        sink.flush()
        os.fsync(sink.fileno())
