"""OpenAI's files API: the files that batches read and write."""

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from penstock.gateway.files.files import (
    PURPOSES,
    ExpiresAfter,
    FileNotFound,
    FileRecord,
    Files,
)
from penstock.gateway.files.storage import discarded, folder_errors
from penstock.gateway.http.idempotency import name_under
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, tenant_of
from penstock.gateway.http.upload import Upload, declared_bytes, receive
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.gateway.openai.paging import After, Limit, Order, cut, page
from penstock.gateway.openai.validation import validate
from penstock.schemas.errors import InvalidJob

router = APIRouter(prefix="/v1/files", tags=["files"])
BYTES = "application/octet-stream"


@router.post("", dependencies=WRITE_LIMIT)
async def upload(request: Request, gateway: Open) -> Response:
    """Upload a file: multipart/form-data with `file` and with `purpose`."""
    files, tenant, settings = gateway.files, tenant_of(request), gateway.settings
    part, most_bytes = files.new_part(), gateway.most_stored(ask_of(request))
    num_bytes = declared_bytes(request, settings.max_file_bytes)
    async with gateway.storage.room(tenant, part.name, num_bytes, most_bytes):
        with folder_errors(), discarded(part):
            body = await receive(request, part, settings.max_file_bytes)
            record = await _record(files, tenant, body)
            letters = await name_under(request, gateway, body.digest())
            record = record.model_copy(update={"id": f"file-{letters[:26]}"})
            await files.add(part, record, most_bytes, part.name)
    return json_response((await files.get(tenant, record.id)).shape())


@router.get("")
async def listed(
    request: Request,
    gateway: Open,
    purpose: str | None = None,
    after: After = None,
    limit: Limit = 10_000,
    order: Order = "desc",
) -> Response:
    files = await gateway.files.list(tenant_of(request))
    records = {record.id: record for record in files if purpose in (None, record.purpose)}
    ids = list(records) if order == "desc" else list(records)[::-1]
    page_ids, has_more = cut(ids, after, limit)
    return json_response(page([records[file_id].shape() for file_id in page_ids], has_more))


@router.get("/{file_id}")
async def retrieve(file_id: str, request: Request, gateway: Open) -> Response:
    return json_response((await gateway.files.get(tenant_of(request), file_id)).shape())


@router.get("/{file_id}/content")
async def content(file_id: str, request: Request, gateway: Open) -> Response:
    record = await gateway.files.get(tenant_of(request), file_id)
    try:
        source = await gateway.files.storage.content(record.id)
    except FileNotFoundError:
        raise FileNotFound(file_id) from None
    if isinstance(source, Path):
        return FileResponse(source, media_type=BYTES)
    return StreamingResponse(
        source, headers={"content-length": f"{record.bytes}"}, media_type=BYTES
    )


@router.delete("/{file_id}")
async def delete(file_id: str, request: Request, gateway: Open) -> Response:
    await gateway.files.delete(await gateway.files.get(tenant_of(request), file_id))
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def _record(files: Files, tenant: str, body: Upload) -> FileRecord:
    purpose = body.fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise InvalidJob(f"purpose: give one of {', '.join(PURPOSES)}", "purpose")
    now_s = await files.now_s()
    return FileRecord(
        id="",
        tenant=tenant,
        filename=body.filename,
        purpose=purpose,
        bytes=body.num_bytes,
        created_s=now_s,
        expires_s=now_s + files.kept_s(_kept_s(body.fields)),
    )


def _kept_s(fields: dict[str, str]) -> int | None:
    """Return how many seconds the form asks to keep the file; None where it does not say.

    It says so in `expires_after[anchor]` and `expires_after[seconds]`. Raises InvalidJob.
    """
    texts = {
        name: fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in fields
    }
    if not texts:
        return None
    seconds = texts.get("seconds", "")
    expiry = texts | {"seconds": int(seconds) if seconds.isdecimal() else seconds}
    return validate(ExpiresAfter, expiry).seconds
