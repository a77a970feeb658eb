"""OpenAI's uploads: a file that comes in parts."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.files.storage import discarded, folder_errors
from penstock.gateway.files.uploads import MAX_PART_BYTES, CompleteRequest, UploadRequest
from penstock.gateway.http.body import read
from penstock.gateway.http.idempotency import name_of, name_under
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, tenant_of
from penstock.gateway.http.upload import receive
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.schemas.api.openai import JsonObject

router = APIRouter(prefix="/v1/uploads", tags=["files"])


@router.post("", dependencies=WRITE_LIMIT)
async def create(request: Request, gateway: Open) -> Response:
    body = await read(request, gateway, UploadRequest)
    tenant, most_bytes = tenant_of(request), gateway.most_stored(ask_of(request))
    letters = await name_of(request, gateway, body)
    record = await gateway.uploads.create(tenant, body, most_bytes, letters)
    return json_response(record.shape(record.created_s))


@router.post("/{upload_id}/parts", dependencies=WRITE_LIMIT)
async def add_part(upload_id: str, request: Request, gateway: Open) -> Response:
    """Add a part: multipart/form-data with `data`."""
    uploads = gateway.uploads
    record = await uploads.get(tenant_of(request), upload_id)
    await uploads.check_open(record)
    part = gateway.files.new_part()
    with folder_errors(), discarded(part):
        body = await receive(request, part, MAX_PART_BYTES, "data")
        letters = await name_under(request, gateway, body.digest())
        part_id = await uploads.add(record, part, body.num_bytes, letters)
    fields: JsonObject = {"id": part_id, "object": "upload.part", "upload_id": upload_id}
    return json_response(fields | {"created_at": await gateway.files.now_s()})


@router.post("/{upload_id}/complete", dependencies=WRITE_LIMIT)
async def complete(upload_id: str, request: Request, gateway: Open) -> Response:
    """Join the parts in the order given, which makes the file."""
    body = await read(request, gateway, CompleteRequest)
    await name_of(request, gateway, body)  # a repeat asks the same
    record = await gateway.uploads.get(tenant_of(request), upload_id)
    with folder_errors():
        file = await gateway.uploads.complete(record, body, gateway.most_stored(ask_of(request)))
    return json_response(record.model_copy(update={"end": "completed"}).shape(0, file))


@router.post("/{upload_id}/cancel")
async def cancel(upload_id: str, request: Request, gateway: Open) -> Response:
    record = await gateway.uploads.get(tenant_of(request), upload_id)
    return json_response((await gateway.uploads.cancel(record)).shape(0))
