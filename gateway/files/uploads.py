"""Files that come in parts, which may come at once, from several callers, and again.

A part is a file in the files' folder until the upload is complete: then they are joined in the
order that the caller gives, and the whole becomes a file as any other. An upload ends once: its end
is written to Redis where there is none yet. Parts of uploads that nobody ended are swept with the
other files that are left over.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.gateway.files.files import PURPOSES, ExpiresAfter, FileRecord, Files
from penstock.gateway.files.storage_accounts import StorageAccounts, refuse_above
from penstock.gateway.tasks.due import fields_of
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.counted import counted
from penstock.schemas.errors import (
    InvalidJob,
    JobNotFound,
    PenstockError,
    RateLimited,
    StorageQuotaExceeded,
)
from penstock.schemas.keys import CHORES, short_digest
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import Report

OPEN_S = 3600  # for the parts to come
KNOWN_S = 86_400  # how long an upload is known after that
MOST_OPEN = 100  # uploads of a tenant that have not ended
MOST_PARTS = 10_000
MAX_PART_BYTES = 64 * 2**20

End = Literal["completed", "cancelled"]


class UploadNotFound(JobNotFound):
    code = "upload_not_found"

    def __init__(self, upload_id: str) -> None:
        PenstockError.__init__(self, f"upload {upload_id!r} is not known here", "upload_id")


class UploadRequest(Report):
    """The body of POST /v1/uploads."""

    bytes: int = Field(ge=0, description="of the whole file")
    filename: str = Field(min_length=1, max_length=256)
    mime_type: str = Field(max_length=256)
    purpose: Literal[PURPOSES]  # type: ignore[valid-type]
    expires_after: ExpiresAfter | None = None


class CompleteRequest(Report):
    """The body that ends an upload."""

    part_ids: list[str] = Field(max_length=MOST_PARTS, description="in their order in the file")
    md5: str | None = Field(None, description="of the whole file, in hexadecimal digits")


class UploadRecord(Report):
    id: str
    tenant: str
    asked: UploadRequest
    created_s: int
    end: End | None = None
    parts: dict[str, int] = Field({}, description="the bytes of each")

    @property
    def expires_s(self) -> int:
        return self.created_s + OPEN_S

    def shape(self, now_s: int, file: FileRecord | None = None) -> JsonObject:
        """Return the upload as OpenAI's API shows one."""
        end = self.end or ("expired" if now_s >= self.expires_s else None)
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.asked.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.asked.filename,
            "purpose": self.asked.purpose,
            "status": end or "pending",
            "file": file.shape() if file else None,
        }


class Uploads:
    def __init__(self, redis: Redis, files: Files, max_file_bytes: int) -> None:
        self._connection = Connection(redis)
        self._accounts = StorageAccounts(redis)
        self._files = files
        self._max_file_bytes = max_file_bytes

    async def create(
        self, tenant: str, request: UploadRequest, most_bytes: int, letters: str
    ) -> UploadRecord:
        """Begin an upload, for whose whole file there is room from now on.

        One that these letters named before is returned as it is.

        Raises InvalidJob, RateLimited, StorageQuotaExceeded.
        """
        if request.bytes > self._max_file_bytes:
            raise InvalidJob(f"bytes: a file has at most {self._max_file_bytes}", "bytes")
        _ = self._files.folder  # raises where there is none
        record = UploadRecord(
            id=f"upload_{letters[:26]}",
            tenant=tenant,
            asked=request,
            created_s=await self._files.now_s(),
        )
        reply = await self._connection.run(
            "files/open_upload",
            CHORES,
            record.id,
            tenant,
            record.model_dump_json(),
            request.bytes,
            OPEN_S,
            OPEN_S + KNOWN_S,
            MOST_OPEN,
            most_bytes,
        )
        if reply[0] == b"full":
            raise RateLimited(
                f"{MOST_OPEN} uploads have not ended, which is the most", retry_after_ms=60_000
            )
        refuse_above(reply, most_bytes)
        return await self.get(tenant, record.id) if reply[0] == b"known" else record

    async def get(self, tenant: str, upload_id: str) -> UploadRecord:
        """Return an upload. Raises UploadNotFound, also for another tenant's."""
        _, fields = await fields_of(self._connection, f"upload:{upload_id}")
        if "record" not in fields:
            raise UploadNotFound(upload_id)
        record = UploadRecord.model_validate_json(fields["record"])
        if record.tenant != tenant:
            raise UploadNotFound(upload_id)
        parts = {name: int(size) for name, size in fields.items() if name.startswith("part_")}
        return record.model_copy(update={"parts": parts, "end": fields.get("end")})

    async def add(self, record: UploadRecord, part: Path, num_bytes: int, letters: str) -> str:
        """Make a part of what was received, and return its id. It may be repeated.

        Raises InvalidJob, UploadNotFound.
        """
        part_id = f"part_{letters[:26]}"
        name, whole = _part_name(record, part_id), record.asked.bytes
        await self._files.storage.put(part, name)
        reply = await self._connection.run(
            "files/add_part", CHORES, record.id, part_id, num_bytes, MOST_PARTS, whole
        )
        if reply[0] == b"ok":
            return part_id
        await self._files.storage.delete(name)
        if reply[0] == b"missing":
            raise UploadNotFound(record.id)
        if reply[0] == b"parts":
            raise InvalidJob(f"data: an upload has at most {MOST_PARTS} parts", "data")
        raise InvalidJob(f"data: the parts have more than {whole} bytes", "data")

    async def check_open(self, record: UploadRecord) -> None:
        """Raise InvalidJob where an upload takes no more parts."""
        status = record.shape(await self._files.now_s())["status"]
        if status != "pending":
            raise InvalidJob(f"upload_id: the upload is {status}", "upload_id")

    async def complete(
        self, record: UploadRecord, request: CompleteRequest, most_bytes: int
    ) -> FileRecord:
        """Make a file of parts, and end the upload. It may be repeated.

        Raises InvalidJob, FileNotFound, StorageQuotaExceeded.
        """
        if record.end != "completed":
            await self.check_open(record)
        _check(record, request)
        part = self._files.new_part()
        copies = [part.with_suffix(f".{number}") for number in range(len(request.part_ids))]
        try:
            paths = [
                await self._files.storage.local(_part_name(record, part_id), copy)
                for part_id, copy in zip(request.part_ids, copies, strict=True)
            ]
            await asyncio.to_thread(_join, paths, part, request.md5)
            await self._end(record, "completed")
            file = await self._file(record)
            await self._files.add(part, file, most_bytes, record.id)
        except FileNotFoundError:  # it was done, and is asked again
            return await self._files.get(record.tenant, _file_id(record))
        except (InvalidJob, StorageQuotaExceeded):  # as where the tenant has no room for it
            if record.end is None:
                await self._connection.call("HDEL", f"{CHORES}upload:{record.id}", "end")
            raise
        finally:
            for path in (part, *copies):
                path.unlink(missing_ok=True)
        await self._discard(record)
        return file

    async def _file(self, record: UploadRecord) -> FileRecord:
        request, now_s = record.asked, await self._files.now_s()
        kept_s = self._files.kept_s(
            request.expires_after.seconds if request.expires_after else None
        )
        return FileRecord(
            id=_file_id(record),
            tenant=record.tenant,
            filename=request.filename,
            purpose=request.purpose,
            bytes=request.bytes,
            created_s=now_s,
            expires_s=now_s + kept_s,
        )

    async def cancel(self, record: UploadRecord) -> UploadRecord:
        """End an upload without a file. Raises InvalidJob where it has ended otherwise."""
        if record.end != "cancelled":
            await self.check_open(record)
            await self._end(record, "cancelled")
        await self._discard(record)
        await self._accounts.release(record.tenant, record.id)
        return record.model_copy(update={"end": "cancelled"})

    async def _end(self, record: UploadRecord, end: End) -> None:
        args = record.id, record.tenant, end
        (state,) = await self._connection.run("files/end_upload", CHORES, *args)
        if state == b"missing":
            raise UploadNotFound(record.id)
        if state != end.encode():
            raise InvalidJob("upload_id: the upload has ended otherwise", "upload_id")

    async def _discard(self, record: UploadRecord) -> None:
        for part_id in record.parts:
            await self._files.storage.delete(_part_name(record, part_id))


def _part_name(record: UploadRecord, part_id: str) -> str:
    return f".{record.id}.{part_id}"


def _file_id(record: UploadRecord) -> str:
    return f"file-{short_digest(record.id)}"


def _check(record: UploadRecord, request: CompleteRequest) -> None:
    for part_id in request.part_ids:
        if part_id not in record.parts:
            raise InvalidJob(f"part_ids: {part_id[:60]!r} is no part of this upload", "part_ids")
    total = sum(record.parts[part_id] for part_id in request.part_ids)
    if total != record.asked.bytes:
        sentence = f"the parts have {counted(total, 'byte')}, the file {record.asked.bytes}"
        raise InvalidJob(f"part_ids: {sentence}", "part_ids")


def _join(paths: Sequence[Path], whole: Path, md5: str | None) -> None:
    """Write the parts one after another, and sync them to disk. Raises InvalidJob."""
    with whole.open("w+b") as sink:
        for path in paths:
            with path.open("rb") as source:
                shutil.copyfileobj(source, sink)
        sink.flush()
        os.fsync(sink.fileno())
        sink.seek(0)
        if md5 is not None:
            digest = hashlib.file_digest(sink, "md5").hexdigest()
            if digest != md5.lower():
                raise InvalidJob(f"md5: the file's is {digest}", "md5")
