"""Where the bytes of finished files are: in the folder, or in a store of objects.

What is being made, and copies of what is being read, are in the folder of the process in any case.
"""

import asyncio
import errno
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from penstock.schemas.errors import NotServed, Unavailable
from penstock.schemas.network.object_store import NOT_THERE, open_store

NAME = re.compile(r"[a-z0-9._-]*[a-z2-7]{26}(\.part_[a-z2-7]{26})?")
PARTS_AT_ONCE = 4  # parts of 5 MiB; each is sent within the time that a store is asked again
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
log = logging.getLogger(__name__)


class StorageUnavailable(Unavailable):
    code, status = "storage_unavailable", 503


class StorageFull(Unavailable):
    """Raised where the disk of the folder has no room for what is being written."""

    code, status = "storage_full", 507


class NoSuchStore(NotServed):
    """Raised where a store of objects answers that there is none at its URL."""


class FileStorage(Protocol):
    async def check(self) -> None:
        """Look whether files can be here. Raises NoSuchStore, StorageUnavailable."""

    async def put(self, part: Path, name: str) -> None:
        """Move a local file, which was synced to disk, to a name. It may be repeated."""

    async def local(self, name: str, copy: Path) -> Path:
        """Return a path where the bytes can be read: their own, or `copy`, where they now are.

        Raises FileNotFoundError.
        """

    async def content(self, name: str) -> Path | AsyncIterator[bytes]:
        """Return the bytes: the path where they are, or as they come. Raises FileNotFoundError."""

    async def delete(self, name: str) -> None:
        """Delete a file, if it is there."""

    def names(self) -> AsyncIterator[tuple[str, float]]:
        """Yield all names, each with how many seconds ago it was written."""


class FolderStorage:
    """The folder itself, which all gateways and housekeepers share then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def check(self) -> None:
        return  # the folder was made

    async def put(self, part: Path, name: str) -> None:
        await asyncio.to_thread(_move, part, self._path(name))

    async def local(self, name: str, copy: Path) -> Path:
        return self._path(name)

    async def content(self, name: str) -> Path:
        path = self._path(name)
        if not path.exists():
            raise FileNotFoundError(name)
        return path

    async def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        """Return a path inside the folder. Raises FileNotFoundError for what names none."""
        if not NAME.fullmatch(name):
            raise FileNotFoundError(name)
        return self._folder / name

    async def names(self) -> AsyncIterator[tuple[str, float]]:
        return  # the folder is swept in any case
        yield


class ObjectStorage:
    """A store of objects at a URL: S3 and what speaks as it, Google's and Microsoft's.

    Raises ValueError for a URL that means nothing, ImportError without the package obstore.
    """

    def __init__(self, url: str) -> None:
        self._no_bucket = f"files_url: {url}: there is no such bucket; make it, or name another"
        self._store = open_store(url)

    async def check(self) -> None:
        import obstore

        try:
            with _storage_errors():
                async for _ in obstore.list(self._store):
                    return
        except StorageUnavailable as error:
            if NOT_THERE in str(error.__context__):
                raise NoSuchStore(self._no_bucket) from None
            raise

    async def put(self, part: Path, name: str) -> None:
        import obstore

        if not await asyncio.to_thread(part.exists):  # it was put there before
            return
        with _storage_errors():
            try:
                await obstore.put_async(self._store, name, part, max_concurrency=PARTS_AT_ONCE)
            except FileNotFoundError:
                log.error("the store of files failed: %s", self._no_bucket)
                raise StorageUnavailable("file: the store of files is not there now") from None
        await asyncio.to_thread(part.unlink)

    async def local(self, name: str, copy: Path) -> Path:
        if await asyncio.to_thread(copy.exists):
            return copy
        pieces = await self.content(name)
        with discarded(copy.with_name(f".{secrets.token_hex(16)}.part")) as part:
            with await asyncio.to_thread(part.open, "wb") as sink:
                async for piece in pieces:
                    await asyncio.to_thread(sink.write, piece)
            return await asyncio.to_thread(part.replace, copy)

    async def content(self, name: str) -> AsyncIterator[bytes]:
        import obstore

        with _storage_errors():
            result = await obstore.get_async(self._store, name)
        return _pieces(result.stream())

    async def delete(self, name: str) -> None:
        import obstore

        with _storage_errors(), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, name)

    async def names(self) -> AsyncIterator[tuple[str, float]]:
        import obstore

        with _storage_errors():
            async for page in obstore.list(self._store):
                for entry in page:
                    yield entry["path"], time.time() - entry["last_modified"].timestamp()


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise StorageUnavailable for what goes wrong at the store; the log says what."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        log.error("the store of files failed: %s", f"{error}".partition("\n")[0])
        raise StorageUnavailable("file: the store of files does not answer; try again") from None


@contextmanager
def folder_errors() -> Iterator[None]:
    """Raise StorageFull or StorageUnavailable for what goes wrong in the folder.

    The log says what.
    """
    try:
        yield
    except OSError as error:
        log.error("the folder of files failed: %s", error.strerror)
        if error.errno in FULL:
            full = "file: the disk of this server's files is full; delete files, or try again later"
            raise StorageFull(full) from None
        raise StorageUnavailable("file: the folder of files fails; try again") from None


@contextmanager
def discarded(part: Path) -> Iterator[Path]:
    """Delete `part` at the end, unless it became a file and was moved away."""
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


async def _pieces(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    with _storage_errors():
        async for piece in stream:
            yield bytes(piece)


def _move(part: Path, path: Path) -> None:
    """Move a part to its path and sync the folder, to survive a power loss. It may be repeated."""
    if part.exists():
        part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
