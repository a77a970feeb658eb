"""OpenAI's routes for responses: a new one, and those that were stored."""

from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, WebSocket
from pydantic import JsonValue

from penstock.gateway.admission.forms import submit
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.admission.responses import (
    given_up_if_refused,
    read_response,
    read_with_items,
    result_of,
    stored_form,
)
from penstock.gateway.follow.resumable import START
from penstock.gateway.http.body import HttpBody
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, tenant_of
from penstock.gateway.http.sse import OpenedStream
from penstock.gateway.http.whole import streamed, whole
from penstock.gateway.openai.paging import ItemLimit, Order
from penstock.gateway.openai.responses import num_bytes_of
from penstock.gateway.openai.texts import TextContext
from penstock.gateway.responses.answers import ResponseStream, response_answer, running_answer
from penstock.gateway.responses.conversation import ConversationNotFound
from penstock.gateway.responses.requests import input_tokens_form
from penstock.gateway.responses.stored import input_items, job_id_of, shown
from penstock.gateway.sockets.session import ResponsesSocket
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import Result

router = APIRouter(tags=["openai"])


@router.post("/v1/responses")
async def responses(request: Request, gateway: Open) -> Response:
    ask = ask_of(request)
    form, noted_in = await read_response(gateway, ask, HttpBody(request, gateway))
    async with given_up_if_refused(gateway, form, noted_in):
        if form.is_streamed:
            return await streamed(request, gateway, form, ResponseStream)
        if not form.job.background:
            return await whole(request, gateway, form, response_answer)
        form, _ = await submit(gateway, ask, form)
        return json_response(running_answer(form, "queued"))


@router.websocket("/v1/responses")
async def responses_socket(websocket: WebSocket) -> None:
    """Answer each message as a request for a streamed response."""
    await websocket.accept()
    await ResponsesSocket(websocket, tenant_of(websocket)).serve()


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, gateway: Open) -> Response:
    """Count the tokens of a prompt."""
    ask, body = ask_of(request), HttpBody(request, gateway)
    form = await read_with_items(gateway, ask, body, partial(input_tokens_form, ask.caller))
    gateway.tell_ignored(ask, form.ignored_names)

    def counted(form: TextContext, result: Result) -> JsonObject:
        count = len(result.choices[0].prompt_ids or ())
        return {"object": "response.input_tokens", "input_tokens": count}

    return await whole(request, gateway, form, counted)


@router.get("/v1/responses/{response_id}")
async def response(
    response_id: str,
    request: Request,
    gateway: Open,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, description="the last event's number")] = -1,
) -> Response:
    """Show a stored response, or stream its events after a number."""
    job_id, tenant = job_id_of(response_id), tenant_of(request)
    if not stream:
        return await _shown(gateway, job_id, tenant)
    form, _ = await stored_form(gateway, job_id, tenant)
    events = gateway.client.event_batches(job_id, tenant=tenant)
    writer = ResponseStream(form, START, starting_after)
    answer = gateway.reading(ask_of(request), job_id, events)
    return OpenedStream(answer, writer, gateway.settings.ping_s)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, request: Request, gateway: Open) -> Response:
    job_id, tenant = job_id_of(response_id), tenant_of(request)
    await stored_form(gateway, job_id, tenant)  # a job that is no response is not found
    await gateway.client.cancel(job_id, tenant)
    return await _shown(gateway, job_id, tenant)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request, gateway: Open) -> Response:
    job_id, tenant = job_id_of(response_id), tenant_of(request)
    form, _ = await stored_form(gateway, job_id, tenant)
    if isinstance(conversation := form.job.repeated.get("conversation"), dict):
        with suppress(ConversationNotFound):  # it writes down what the response said
            await gateway.conversations.read(tenant, f"{conversation['id']}")
    await gateway.delete(job_id, tenant)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def items(
    response_id: str,
    request: Request,
    gateway: Open,
    limit: ItemLimit = 20,
    order: Order = "desc",
    after: Annotated[str | None, Query(description="the last item's id")] = None,
) -> Response:
    """List what a response was asked with, the turns before it among them."""
    form, _ = await stored_form(gateway, job_id_of(response_id), tenant_of(request))

    def listed() -> Response:
        inputs = input_items(form)
        items = inputs if order == "asc" else inputs[::-1]
        ids = [item["id"] for item in items]
        begin = ids.index(after) + 1 if after in ids else 0
        page = items[begin : begin + limit]
        return json_response(
            {
                "object": "list",
                "data": list[JsonValue](page),
                "first_id": ids[begin] if page else None,
                "last_id": ids[begin + len(page) - 1] if page else None,
                "has_more": begin + len(page) < len(items),
            }
        )

    return await gateway.client.off_loop.run(form.job.tenant, form.job.guess_bytes(), listed)


async def _shown(gateway: Gateway, job_id: str, tenant: str) -> Response:
    form, status = await stored_form(gateway, job_id, tenant)
    result = await result_of(gateway, status, tenant)

    def made() -> Response:
        return json_response(shown(form, status, result))

    num_bytes = 0 if result is None else num_bytes_of(result)
    return await gateway.client.off_loop.run(tenant, num_bytes, made)
