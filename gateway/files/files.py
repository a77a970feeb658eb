"""The files of tenants. Their bytes are in a storage that gateways and housekeeping share.

Their records are in Redis. A file is stored before Redis has its record, and Redis forgets it
before it is deleted. So what is stored and Redis does not know is left over, and is swept.
"""

import os
import re
import secrets
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field, ValidationInfo, field_validator

from penstock.gateway.files.storage import SCHEMES, FileStorage, FolderStorage, ObjectStorage
from penstock.gateway.tasks.due import server_time_ms
from penstock.schemas.errors import InvalidJob, JobNotFound, PenstockError
from penstock.schemas.keys import CHORES, short_digest
from penstock.schemas.openai import JsonObject
from penstock.schemas.process.start import Settings
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire import Report, read_or_none

BATCH_PART = re.compile(r"\.(batch_[a-z2-7]{26})\.(output|errors|order|input)")
FILE_ID = re.compile(r"file-[a-z2-7]{26}")
PURPOSES = ("batch", "user_data", "assistants", "vision", "fine-tune", "evals")
UNKNOWN_KEPT_S = 3600  # since an upload in progress is unknown to Redis, too
PAGE = 64
NO_QUOTA = 2**53


class FilesSettings(Settings):
    """The settings of files: their folder, their limits, and how long they are kept."""

    files_folder: Path | None = Field(
        None, description="shared by gateways and housekeeping; none: no files, no batches"
    )
    files_url: str | None = Field(
        None,
        pattern=rf"^({'|'.join(SCHEMES)})://[^/?#@]+(/[^?#]*)?$",
        description="where finished files are instead, as s3://bucket/prefix",
    )

    @field_validator("files_url")
    @classmethod
    def has_what_it_needs(cls, given: str | None, others: ValidationInfo) -> str | None:
        if given is not None and others.data.get("files_folder") is None:
            raise ValueError("give --files-folder too, for what is being made")
        if given is not None and find_spec("obstore") is None:
            raise ValueError("needs a package: pip install 'penstock[objects]'")
        return given

    max_file_bytes: int = Field(200 * 2**20, ge=1, description="larger files get 413")
    files_quota: int = Field(1000, ge=1, description="files a tenant may have")
    files_quota_bytes: int = Field(5 * 2**30, ge=1, description="what they may hold together")
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
        if settings.files_folder is not None:
            settings.files_folder.mkdir(parents=True, exist_ok=True)
        self._storage: FileStorage | None = None
        if settings.files_url is not None:
            self._storage = ObjectStorage(settings.files_url)
        elif settings.files_folder is not None:
            self._storage = FolderStorage(settings.files_folder)

    @property
    def folder(self) -> Path:
        if self._settings.files_folder is None:
            raise InvalidJob(NO_FOLDER, "file")
        return self._settings.files_folder

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

    async def add(self, part: Path, record: FileRecord) -> None:
        """Make a file of a part that was written and synced to disk.

        Raises InvalidJob if the tenant would be above its quota.
        """
        settings = self._settings
        reply = await self._add(part, record, settings.files_quota, settings.files_quota_bytes)
        if reply == b"files":
            await self._refuse(record, f"{settings.files_quota} files, which is the most")
        if reply == b"bytes":
            most = f"files up to the most of {settings.files_quota_bytes} bytes"
            await self._refuse(record, most)

    async def add_output(self, part: Path, record: FileRecord) -> None:
        """Make a file of a part that this server wrote, ignoring the quota. It may be repeated."""
        await self._add(part, record, NO_QUOTA, NO_QUOTA)

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
        found = [read_or_none(FileRecord, text) for text in texts if isinstance(text, bytes)]
        return [record for record in found if record is not None]

    async def delete(self, record: FileRecord) -> None:
        await self._connection.run("files/drop", CHORES, record.id, record.tenant, record.bytes)
        await self.storage.delete(record.id)

    async def sweep(self) -> int:
        """Delete expired files and old ones that Redis does not know; return how many."""
        count = 0
        while records := await self._connection.run("files/expired", CHORES, PAGE):
            for text in records:
                await self.delete(FileRecord.model_validate_json(text))
                count += 1
        now_s = self._folder_time_s()
        for path in self.folder.iterdir():
            is_old = now_s - path.stat().st_mtime > UNKNOWN_KEPT_S
            if is_old and not await self._is_known(path.name):
                path.unlink(missing_ok=True)
                count += 1
        async for name, age_s in self.storage.names():
            if age_s > UNKNOWN_KEPT_S and not await self._is_known(name):
                await self.storage.delete(name)
                count += 1
        return count

    def _folder_time_s(self) -> float:
        """Return the time by the clock that dates the folder's files. This host's may differ."""
        with tempfile.TemporaryFile(dir=self.folder) as now:
            return os.fstat(now.fileno()).st_mtime

    async def _is_known(self, name: str) -> bool:
        """Return whether a name is that of a file, or of what a batch that runs is writing."""
        batch = BATCH_PART.fullmatch(name)
        key = f"batch_lines:{batch[1]}" if batch else f"file:{name}"
        return await self._connection.call("EXISTS", CHORES + key) == 1

    async def _add(self, part: Path, record: FileRecord, most_files: int, most_bytes: int) -> bytes:
        await self.storage.put(part, record.id)
        reply = await self._connection.run(
            "files/add",
            CHORES,
            record.id,
            record.tenant,
            record.dump(),
            record.bytes,
            record.expires_s * 1000,
            most_files,
            most_bytes,
        )
        return reply[0]

    async def _refuse(self, record: FileRecord, has: str) -> NoReturn:
        await self.storage.delete(record.id)
        raise InvalidJob(f"file: this tenant has {has}; delete some", "file")


def new_file_id() -> str:
    return f"file-{short_digest(secrets.token_hex(16))}"
