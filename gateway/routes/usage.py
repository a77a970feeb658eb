"""Tells what the caller's tenant has stored and used, of what it may."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, tenant_of
from penstock.schemas.api.openai import JsonObject

router = APIRouter(tags=["jobs"])


@router.get("/v1/usage")
async def usage(request: Request, gateway: Open) -> Response:
    """Tell what the caller's tenant has stored, and what its accounts used of each model."""
    tenant = tenant_of(request)
    use = await gateway.storage.used(tenant)
    fields: JsonObject = {
        "object": "usage",
        "tenant": tenant,
        "storage": use.shape(gateway.most_stored(ask_of(request))),
        "accounts": [*await gateway.overview.accounts(tenant)],
    }
    return json_response(fields)
