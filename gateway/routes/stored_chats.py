"""OpenAI's routes for chats that were stored: list, show, change and delete them."""

import re
from collections.abc import Mapping
from contextlib import suppress

from fastapi import APIRouter, Request, Response

from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.follow.large_texts import TextLost
from penstock.gateway.http.body import read
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, tenant_of
from penstock.gateway.http.writes import WRITE_LIMIT
from penstock.gateway.openai.paging import After, ItemLimit, Limit, Order, cut, page, page_of
from penstock.gateway.openai.responses import AnswerContext, num_bytes_of
from penstock.gateway.openai.stored_chats import (
    PREFIX,
    chat_job_id,
    shown_chat,
    stored_form,
    stored_messages,
)
from penstock.schemas.api.openai import JsonObject, MetadataRequest
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import JobGone, JobNotFound

OF_METADATA = re.compile(r"metadata\[(.{1,512})\]")
router = APIRouter(prefix="/v1/chat/completions", tags=["openai"])


@router.get("")
async def listed(
    request: Request,
    gateway: Open,
    after: After = None,
    limit: ItemLimit = 20,
    order: Order = "asc",
    model: str | None = None,
) -> Response:
    """List the stored chats that were answered; with `metadata[name]` those that have it so."""
    tenant = tenant_of(request)
    metadata = {
        match[1]: value
        for name, value in request.query_params.items()
        if (match := OF_METADATA.fullmatch(name))
    }
    ids = await gateway.stored_chats.ids(tenant)
    completion_ids = [f"{PREFIX}{job_id}" for job_id in (ids if order == "asc" else ids[::-1])]
    rest, _ = cut(completion_ids, after, len(completion_ids) or 1)
    chats = list[JsonObject]()
    for completion_id in rest:
        if len(chats) > limit:
            break
        job_id = chat_job_id(completion_id)
        status = await _status(gateway, job_id, tenant)
        if status is None or model not in (None, status.model) or not _has(status, metadata):
            continue
        with suppress(JobNotFound, JobGone, TextLost):
            chats.append(await _shown(gateway, job_id, tenant))
    return json_response(page(chats[:limit], len(chats) > limit))


@router.get("/{completion_id}")
async def retrieve(completion_id: str, request: Request, gateway: Open) -> Response:
    return json_response(await _shown(gateway, chat_job_id(completion_id), tenant_of(request)))


@router.post("/{completion_id}", dependencies=WRITE_LIMIT)
async def update(completion_id: str, request: Request, gateway: Open) -> Response:
    """Give a stored chat other metadata."""
    job_id, tenant = chat_job_id(completion_id), tenant_of(request)
    await _stored(gateway, job_id, tenant)  # a job that is no chat is not found
    body = await read(request, gateway, MetadataRequest)
    await gateway.client.annotate(job_id, body.metadata, tenant)
    return json_response(await _shown(gateway, job_id, tenant))


@router.delete("/{completion_id}")
async def delete(completion_id: str, request: Request, gateway: Open) -> Response:
    job_id, tenant = chat_job_id(completion_id), tenant_of(request)
    await _stored(gateway, job_id, tenant)
    await gateway.delete(job_id, tenant)
    await gateway.stored_chats.forget(tenant, job_id)
    fields = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    return json_response(fields)


@router.get("/{completion_id}/messages")
async def messages(
    completion_id: str,
    request: Request,
    gateway: Open,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """List the messages that a stored chat was asked with."""
    form, _ = await _stored(gateway, chat_job_id(completion_id), tenant_of(request))

    def made() -> Response:
        return json_response(page_of(stored_messages(form.job), after, limit, order))

    return await gateway.client.off_loop.run(form.job.tenant, form.job.guess_bytes(), made)


def _has(status: JobStatus, metadata: Mapping[str, str]) -> bool:
    return all(status.metadata.get(name) == value for name, value in metadata.items())


async def _status(gateway: Gateway, job_id: str, tenant: str) -> JobStatus | None:
    """Return how a chat's job stands; None where it was not answered, or is kept no longer."""
    try:
        status = await gateway.client.status(job_id, tenant)
    except JobNotFound:
        await gateway.stored_chats.forget(tenant, job_id)
        return None
    return status if status.state == "succeeded" else None


async def _stored(gateway: Gateway, job_id: str, tenant: str) -> tuple[AnswerContext, JobStatus]:
    """Return a stored chat's form, and how its job stands.

    Raises JobNotFound for what was not stored or not answered.
    """
    try:
        status = await gateway.client.status(job_id, tenant)
        job = await gateway.client.request(job_id, tenant)
    except JobGone:
        raise JobNotFound(job_id) from None
    if status.state != "succeeded":
        raise JobNotFound(job_id)
    size = job.guess_bytes()
    form = await gateway.client.off_loop.run(tenant, size, stored_form, job, status.created_ms)
    return form, status


async def _shown(gateway: Gateway, job_id: str, tenant: str) -> JsonObject:
    form, status = await _stored(gateway, job_id, tenant)
    result = await gateway.client.result(job_id, wait=False, tenant=tenant)
    if result is None:
        raise JobNotFound(job_id)
    size = num_bytes_of(result)
    return await gateway.client.off_loop.run(tenant, size, shown_chat, form, status, result)
