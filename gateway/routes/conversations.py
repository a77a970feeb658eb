"""OpenAI's routes for conversations, and for the items in them."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.body import read
from penstock.gateway.http.idempotency import name_of
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, tenant_of
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.gateway.openai.paging import After, ItemLimit, Order, page, page_of
from penstock.gateway.responses.conversation import ItemNotFound
from penstock.gateway.responses.requests import shown_item
from penstock.schemas.api.openai import MetadataRequest
from penstock.schemas.api.responses import ConversationRequest, ItemsRequest

router = APIRouter(prefix="/v1/conversations", tags=["openai"])


@router.post("", dependencies=WRITE_LIMIT)
async def create(request: Request, gateway: Open) -> Response:
    body = await read(request, gateway, ConversationRequest, may_be_empty=True)
    items = [shown_item(item) for item in body.items]
    conversation = await gateway.conversations.create(
        tenant_of(request),
        body.metadata,
        items,
        gateway.most_stored(ask_of(request)),
        await name_of(request, gateway, body),
    )
    return json_response(conversation.shape())


@router.get("/{conversation_id}")
async def retrieve(conversation_id: str, request: Request, gateway: Open) -> Response:
    conversation = await gateway.conversations.read(tenant_of(request), conversation_id)
    return json_response(conversation.shape())


@router.post("/{conversation_id}", dependencies=WRITE_LIMIT)
async def update(conversation_id: str, request: Request, gateway: Open) -> Response:
    """Give a conversation other metadata."""
    body = await read(request, gateway, MetadataRequest)
    tenant, most_bytes = tenant_of(request), gateway.most_stored(ask_of(request))
    await gateway.conversations.annotate(tenant, conversation_id, body.metadata, most_bytes)
    return json_response((await gateway.conversations.read(tenant, conversation_id)).shape())


@router.delete("/{conversation_id}")
async def delete(conversation_id: str, request: Request, gateway: Open) -> Response:
    await gateway.conversations.delete(tenant_of(request), conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post("/{conversation_id}/items", dependencies=WRITE_LIMIT)
async def add_items(conversation_id: str, request: Request, gateway: Open) -> Response:
    """Add up to 20 items at the end."""
    body = await read(request, gateway, ItemsRequest)
    items = [shown_item(item) for item in body.items]
    tenant, most_bytes = tenant_of(request), gateway.most_stored(ask_of(request))
    letters = await name_of(request, gateway, body)
    new_items = await gateway.conversations.add(tenant, conversation_id, items, most_bytes, letters)
    return json_response(page(new_items, has_more=False))


@router.get("/{conversation_id}/items")
async def list_items(
    conversation_id: str,
    request: Request,
    gateway: Open,
    after: After = None,
    limit: ItemLimit = 20,
    order: Order = "desc",
) -> Response:
    """List the items, without those of a response that is being made."""
    conversation = await gateway.conversations.read(tenant_of(request), conversation_id)

    def made() -> Response:
        return json_response(page_of(conversation.items, after, limit, order))

    return await gateway.client.off_loop.run(conversation.tenant, conversation.num_bytes, made)


@router.get("/{conversation_id}/items/{item_id}")
async def retrieve_item(
    conversation_id: str, item_id: str, request: Request, gateway: Open
) -> Response:
    conversation = await gateway.conversations.read(tenant_of(request), conversation_id)
    for item in conversation.items:
        if item["id"] == item_id:
            return await gateway.client.off_loop.run(
                conversation.tenant, conversation.num_bytes, json_response, item
            )
    raise ItemNotFound(item_id)


@router.delete("/{conversation_id}/items/{item_id}")
async def delete_item(
    conversation_id: str, item_id: str, request: Request, gateway: Open
) -> Response:
    tenant = tenant_of(request)
    conversation = await gateway.conversations.delete_item(tenant, conversation_id, item_id)
    return json_response(conversation.shape())
