"""The files of tenants. Their bytes are in a storage that gateways and housekeeping share.

Their records are in Redis. A file is stored before Redis has its record, and Redis forgets it
before it is deleted. So what is stored and Redis does not know is left over, and is swept.
"""

import asyncio
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.gateway.files.settings import StorageSettings, storage_of
from penstock.gateway.files.storage import FileStorage, StorageUnavailable
from penstock.gateway.files.storage_accounts import NO_QUOTA, refuse_above
from penstock.gateway.tasks.due import server_time_ms
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.counted import counted
from penstock.schemas.errors import InvalidJob, JobNotFound, PenstockError
from penstock.schemas.keys import CHORES, lane_label
from penstock.schemas.queue.registry import Registry
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import Report, read_or_none

BATCH_PART = re.compile(r"\.(batch_[a-z2-7]{26})\.(output|errors|order|input)")
CONVERSATION_TEXT = re.compile(r"(conv_[a-z2-7]{32})\.[a-z2-7]{26}")
FILE_ID = re.compile(r"file-[a-z2-7]{26}")
PURPOSES = ("batch", "user_data", "assistants", "vision", "fine-tune", "evals")
UNKNOWN_KEPT_S = 3600  # since an upload in progress is unknown to Redis, too
PAGE = 64


class FilesSettings(StorageSettings):
    """The settings of files: where they are, their limits, and how long they are kept."""

    max_file_bytes: int = Field(200 * 2**20, ge=1, description="larger files get 413")
    files_quota: int = Field(1000, ge=1, description="files a tenant may have")
    files_kept_s: int = Field(30 * 86_400, ge=1, description="unless the caller says less")


class ExpiresAfter(Report):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class FileNotFound(JobNotFound):
    code = "file_not_found"

    def __init__(self, file_id: str) -> None:
        PenstockError.__init__(self, f"file {file_id!r} is not known here", "file_id")


class FileRecord(Report):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_s: int
    expires_s: int

    def shape(self) -> JsonObject:
        """Return the file as OpenAI's API shows one."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


NO_FOLDER = "file: this server keeps no files; its operator may give it --files-folder"


class Files:
    def __init__(self, redis: Redis, settings: FilesSettings) -> None:
        self._connection = Connection(redis)
        self._settings = settings
        self._storage = storage_of(settings)

    @property
    def folder(self) -> Path:
        if self._settings.files_folder is None:
            raise InvalidJob(NO_FOLDER, "file")
        return self._settings.files_folder

    async def check(self) -> None:
        """Look whether files can be where the settings say. Raises NoSuchStore.

        A store that does not answer now is told in the log: it may come.
        """
        if self._storage is not None:
            with suppress(StorageUnavailable):
                await self._storage.check()

    @property
    def storage(self) -> FileStorage:
        if self._storage is None or self._settings.files_folder is None:
            raise InvalidJob(NO_FOLDER, "file")
        return self._storage

    def kept_s(self, asked_s: int | None) -> int:
        """Return how long a file is kept, in seconds, if a caller asked for so much."""
        return min(asked_s or 2**31, self._settings.files_kept_s)

    def new_part(self) -> Path:
        """Return a new path for bytes that are not a file yet."""
        return self.folder / f".{secrets.token_hex(16)}.part"

    async def add(self, part: Path, record: FileRecord, most_bytes: int, reservation: str) -> None:
        """Make a file of a part that was written and synced to disk.

        It takes the place of what was reserved for it under a name of its own. Raises InvalidJob
        if the tenant would have too many files, StorageQuotaExceeded if it would have more than
        `most_bytes` stored.
        """
        most = self._settings.files_quota
        reply = await self._add(part, record, most, most_bytes, reservation)
        if reply[0] in (b"files", b"quota") and not await self._is_known(record.id):
            await self.storage.delete(record.id)
        if reply[0] == b"files":
            sentence = f"this tenant has {counted(most, 'file')}, which is the most; delete some"
            raise InvalidJob(f"file: {sentence}", "file")
        refuse_above(reply, most_bytes)

    async def add_output(self, part: Path, record: FileRecord) -> None:
        """Make a file of a part that this server wrote, ignoring the quota. It may be repeated."""
        await self._add(part, record, NO_QUOTA, NO_QUOTA, "")

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a file. Raises FileNotFound, also for another tenant's file."""
        if not FILE_ID.fullmatch(file_id):
            raise FileNotFound(file_id)
        text = await self._connection.call("GET", f"{CHORES}file:{file_id}")
        record = read_or_none(FileRecord, text) if isinstance(text, bytes) else None
        if record is None or record.tenant != tenant:
            raise FileNotFound(file_id)
        return record

    async def now_s(self) -> int:
        return await server_time_ms(self._connection) // 1000

    async def list(self, tenant: str) -> list[FileRecord]:
        """Return the tenant's files, the newest first. The quota limits how many there can be."""
        ids = texts_of(await self._connection.call("ZREVRANGE", f"{CHORES}files:{tenant}", 0, -1))
        if not ids:
            return []
        keys = [f"{CHORES}file:{file_id.decode()}" for file_id in ids]
        texts = await self._connection.call("MGET", *keys)
        assert isinstance(texts, list)
        records = [read_or_none(FileRecord, text) for text in texts if isinstance(text, bytes)]
        return [record for record in records if record is not None]

    async def delete(self, record: FileRecord) -> None:
        await self._connection.run("files/drop", CHORES, record.id, record.tenant)
        await self.storage.delete(record.id)

    async def sweep(self) -> int:
        """Delete expired files and old ones that Redis does not know; return how many."""
        count = 0
        while records := await self._connection.run("files/expired", CHORES, PAGE):
            for text in records:
                await self.delete(FileRecord.model_validate_json(text))
                count += 1
        for name in await self._unknown(await asyncio.to_thread(self._old_names)):
            (self.folder / name).unlink(missing_ok=True)
            count += 1
        names = [name async for name, age_s in self.storage.names() if age_s > UNKNOWN_KEPT_S]
        for name in await self._unknown(names):
            await self.storage.delete(name)
            count += 1
        return count

    def _old_names(self) -> Sequence[str]:
        """Return what is in the folder for longer than something unknown may be.

        The clock is that which dates the folder's files. This host's may differ.
        """
        with tempfile.TemporaryFile(dir=self.folder) as now:
            before_s = os.fstat(now.fileno()).st_mtime - UNKNOWN_KEPT_S
        names = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another process deleted it
                if entry.stat().st_mtime < before_s:
                    names.append(entry.name)
        return names

    async def _unknown(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of the names under which nothing is stored that Redis knows."""
        cards = (await Registry(self._connection.redis).cards()).values()
        lanes = [card.lane(number) for card in cards for number in range(card.lanes)]
        by_label = {lane.label: lane for lane in lanes}

        def key_of(name: str) -> str:
            key = f"{CHORES}file:{name}"
            if part := BATCH_PART.fullmatch(name):
                key = f"{CHORES}batch_lines:{part[1]}"
            elif text := CONVERSATION_TEXT.fullmatch(name):
                key = f"{CHORES}conversation:{text[1]}"
            elif lane := by_label.get(lane_label(name) or ""):
                key = f"{lane.job(name)}:request"
            return key

        unknown_names, call = [], self._connection.call
        for at in range(0, len(names), PAGE):
            page = names[at : at + PAGE]
            counts = await asyncio.gather(*[call("EXISTS", key_of(name)) for name in page])
            unknown_names += [name for name, count in zip(page, counts, strict=True) if count == 0]
        return unknown_names

    async def _is_known(self, file_id: str) -> bool:
        """Return whether a repeat of the same request was let in meanwhile."""
        return await self._connection.call("EXISTS", f"{CHORES}file:{file_id}") == 1

    async def _add(
        self, part: Path, record: FileRecord, most_files: int, most_bytes: int, reservation: str
    ) -> Sequence[bytes]:
        await self.storage.put(part, record.id)
        return await self._connection.run(
            "files/add",
            CHORES,
            record.id,
            record.tenant,
            record.dump(),
            record.bytes,
            record.expires_s * 1000,
            most_files,
            most_bytes,
            reservation,
        )
