"""OpenAI's batches API: many requests in one file, run when the queue has time for them."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.batches.batches import BatchAsked
from penstock.gateway.http.body import read
from penstock.gateway.http.idempotency import name_of
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, caller_of, tenant_of
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.gateway.openai.paging import After, Limit, cut, page
from penstock.schemas.errors import InvalidJob

router = APIRouter(prefix="/v1/batches", tags=["batches"])


@router.post("", dependencies=WRITE_LIMIT)
async def create(request: Request, gateway: Open) -> Response:
    body = await read(request, gateway, BatchAsked)
    if body.webhook is not None:
        gateway.outbound.check(body.webhook, "webhook")
    tenant, account = tenant_of(request), caller_of(request).account
    if (await gateway.files.get(tenant, body.input_file_id)).purpose != "batch":
        sentence = "the file's purpose is not batch"
        raise InvalidJob(f"input_file_id: {sentence}", "input_file_id")
    most_bytes, letters = (
        gateway.most_stored(ask_of(request)),
        await name_of(request, gateway, body),
    )
    batch = await gateway.batches.create(tenant, body, account, most_bytes, letters)
    return json_response(batch.shape())


@router.get("")
async def listed(
    request: Request, gateway: Open, after: After = None, limit: Limit = 20
) -> Response:
    tenant = tenant_of(request)
    ids, has_more = cut(await gateway.batches.ids(tenant), after, limit)
    batches = [await gateway.batches.get(tenant, batch_id) for batch_id in ids]
    return json_response(page([batch.shape() for batch in batches], has_more))


@router.get("/{batch_id}")
async def retrieve(batch_id: str, request: Request, gateway: Open) -> Response:
    return json_response((await gateway.batches.get(tenant_of(request), batch_id)).shape())


@router.post("/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request, gateway: Open) -> Response:
    return json_response((await gateway.batches.cancel(tenant_of(request), batch_id)).shape())
