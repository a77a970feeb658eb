"""OpenAI's routes for responses: a new one, and those that were stored."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, WebSocket
from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.follow.resumable import NOTHING
from penstock.gateway.http.context import Gateway, Open
from penstock.gateway.http.middleware import caller_of, span_of, tenant_of
from penstock.gateway.http.sse import OpenedStream
from penstock.gateway.http.whole import (
    Asked,
    admitted,
    read_asked,
    streamed,
    whole,
)
from penstock.gateway.metrics.metrics import RequestTimer
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.paging import ItemLimit, Order
from penstock.gateway.openai.responses import AnswerContext, num_bytes_of
from penstock.gateway.openai.texts import TextContext
from penstock.gateway.responses.answers import ResponseEvents, response_answer, running_answer
from penstock.gateway.responses.conversation import (
    Conversation,
    ConversationLocked,
    ConversationNotFound,
)
from penstock.gateway.responses.conversations import messages_of
from penstock.gateway.responses.references import ReferredItems, references_of
from penstock.gateway.responses.requests import (
    asked_items,
    conversation_id_of,
    input_tokens_form,
    responses_form,
)
from penstock.gateway.responses.stored import (
    conversation,
    form_of,
    input_items,
    job_id_of,
    shown,
)
from penstock.gateway.sockets.session import ENDING, ResponsesSocket
from penstock.gateway.sockets.turns import TURN, ResponseTurn
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import (
    InvalidJob,
    JobGone,
    JobNotFound,
    PenstockError,
    QueueUnreachable,
)
from penstock.schemas.event import Result
from penstock.schemas.keys import CONVERSATION_ID

router = APIRouter(tags=["openai"])


class PreviousNotFound(InvalidJob):
    """Raised where a response is unknown, or is known to another connection alone."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        name = "previous_response_id"
        super().__init__(f"{name}: {response_id[:80]!r} is not found; send all that was said", name)


@router.post("/v1/responses")
async def responses(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form, begun = await _read(request, gateway)
    async with _given_up_if_refused(gateway, form, begun):
        if form.is_streamed:
            return await streamed(request, gateway, watch, form, ResponseEvents)
        if not form.job.background:
            return await whole(request, gateway, watch, form, response_answer)
        form = await admitted(request, gateway, form)
        return _json(running_answer(form, "queued"))


@router.websocket("/v1/responses")
async def responses_socket(websocket: WebSocket) -> None:
    """Answer each message as a request for a streamed response."""
    gateway: Gateway = websocket.app.state.gateway
    await websocket.accept()
    ending = websocket.scope[ENDING]
    await ResponsesSocket(websocket, gateway, websocket.app, ending).serve()


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, gateway: Open) -> Response:
    """Count the tokens of a prompt."""
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await _read_whole(request, gateway, partial(input_tokens_form, caller_of(request)))
    gateway.tell_ignored(request, form.ignored)

    def counted(form: TextContext, result: Result) -> JsonObject:
        count = len(result.choices[0].prompt_ids or ())
        return {"object": "response.input_tokens", "input_tokens": count}

    return await whole(request, gateway, watch, form, counted)


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
    form, _ = await _stored(gateway, job_id, tenant)
    events = gateway.client.event_batches(job_id, tenant=tenant)
    writer = ResponseEvents(form, NOTHING, starting_after)
    following = OpenedStream(events, _stays, writer, gateway.settings.ping_s)
    return gateway.open_reads.bounded(request, following)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, request: Request, gateway: Open) -> Response:
    job_id, tenant = job_id_of(response_id), tenant_of(request)
    await _stored(gateway, job_id, tenant)  # a job that is no response is not found
    await gateway.client.cancel(job_id, tenant)
    return await _shown(gateway, job_id, tenant)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request, gateway: Open) -> Response:
    job_id, tenant = job_id_of(response_id), tenant_of(request)
    form, _ = await _stored(gateway, job_id, tenant)
    if isinstance(conversation := form.job.repeated.get("conversation"), dict):
        with suppress(ConversationNotFound):  # it writes down what the response said
            await gateway.conversations.read(tenant, f"{conversation['id']}")
    await gateway.delete(job_id, tenant)
    return _json({"id": response_id, "object": "response", "deleted": True})


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
    form, _ = await _stored(gateway, job_id_of(response_id), tenant_of(request))

    def listed() -> Response:
        found = input_items(form)
        ordered = found if order == "asc" else found[::-1]
        ids = [each["id"] for each in ordered]
        begin = ids.index(after) + 1 if after in ids else 0
        page = ordered[begin : begin + limit]
        return _json(
            {
                "object": "list",
                "data": list[JsonValue](page),
                "first_id": ids[begin] if page else None,
                "last_id": ids[begin + len(page) - 1] if page else None,
                "has_more": begin + len(page) < len(ordered),
            }
        )

    return await gateway.client.off_loop.run(form.job.tenant, form.job.guess_bytes(), listed)


async def _read_whole(
    request: Request, gateway: Gateway, understood: Callable[[JsonObject], Asked]
) -> Asked:
    """Read a body, with the stored items that it refers to. Raises InvalidJob."""
    tenant, most_bytes = tenant_of(request), gateway.settings.max_body_bytes

    def begun(body: JsonObject) -> Asked | ReferredItems:
        references = references_of(body)
        return ReferredItems(body, references, most_bytes) if references else understood(body)

    referred = await read_asked(request, gateway, begun)
    if not isinstance(referred, ReferredItems):
        return referred
    for source in referred.sources:
        with suppress(JobNotFound):  # its items are missed where they are referred to
            if CONVERSATION_ID.fullmatch(source):
                found = await gateway.conversations.read(tenant, source)
                await gateway.client.off_loop.run(
                    tenant, found.num_bytes, referred.take, found.items
                )
                continue
            form, status = await _stored(gateway, source, tenant)
            result = await _result(gateway, status, tenant)
            num_bytes = form.job.guess_bytes() + (num_bytes_of(result) if result else 0)
            await gateway.client.off_loop.run(
                tenant, num_bytes, referred.take_response, form, status, result
            )
    return await gateway.client.off_loop.run(
        tenant, most_bytes, lambda: understood(referred.whole_body())
    )


async def _read(request: Request, gateway: Gateway) -> tuple[AnswerContext, Conversation | None]:
    """Read a request, with what was said before it.

    The second value is the conversation in which it is noted from now on, if it is.
    """
    caller = caller_of(request)
    turn: ResponseTurn | None = request.scope.get(TURN)

    def understood(body: JsonObject) -> tuple[JsonObject, str, AnswerContext | list[JsonObject]]:
        name = conversation_id_of(body)
        if turn is not None and turn.before is not None:
            return body, name, responses_form(caller, body, before=turn.before)
        if name:
            return body, name, asked_items(body)
        return body, "", [] if body.get("previous_response_id") else responses_form(caller, body)

    body, name, form = await _read_whole(request, gateway, understood)
    begun = None
    if isinstance(form, list):
        if name:
            form, begun = await _in_conversation(request, gateway, body, form, name)
        else:
            form = await _going_on(gateway, caller, body)
    gateway.tell_ignored(request, form.ignored)
    if turn is not None:
        turn.form = form
    return form, begun


async def _in_conversation(
    request: Request, gateway: Gateway, body: JsonObject, items: list[JsonObject], name: str
) -> tuple[AnswerContext, Conversation | None]:
    """Read a request with the conversation that it names, and note it there.

    A request that is repeated under its idempotency key is noted already.
    """
    caller = caller_of(request)
    job_id = await gateway.name(request, f"{body['model']}")
    found = await gateway.conversations.read(caller.tenant, name)
    ids = [entry.job_id for entry in found.entries]
    is_noted = job_id in ids
    if found.is_open and not is_noted:
        raise ConversationLocked
    before = found.entries[: ids.index(job_id)] if is_noted else found.entries

    def made() -> AnswerContext:
        return responses_form(caller, body, job_id, messages_of(before), name)

    # As much as the two may have.
    num_bytes = gateway.settings.max_body_bytes
    form = await gateway.client.off_loop.run(caller.tenant, num_bytes, made)
    if is_noted:
        return form, None
    await gateway.conversations.begin(found, job_id, items, gateway.most_stored(request))
    return form, found


@asynccontextmanager
async def _given_up_if_refused(
    gateway: Gateway, form: AnswerContext, begun: Conversation | None
) -> AsyncIterator[None]:
    """Take a request out of its conversation again if its job is refused."""
    try:
        yield
    except QueueUnreachable:
        raise  # it may be submitted: the conversation finds out
    except PenstockError:
        if begun is not None:
            await gateway.conversations.give_up(begun, form.job.job_id)
        raise


async def _going_on(gateway: Gateway, caller: Caller, body: JsonObject) -> AnswerContext:
    """Read the body of a request that goes on with a stored response."""
    previous = f"{body['previous_response_id']}"
    try:
        job_id = job_id_of(previous, "previous_response_id")
        form, status = await _stored(gateway, job_id, caller.tenant)
    except (InvalidJob, JobNotFound):  # another server's id is unknown here too
        raise PreviousNotFound(previous) from None
    result = await _result(gateway, status, caller.tenant)

    def made() -> AnswerContext:
        return responses_form(caller, body, before=conversation(form, result))

    num_bytes = gateway.settings.max_body_bytes  # as much as the two may have
    return await gateway.client.off_loop.run(caller.tenant, num_bytes, made)


async def _stored(gateway: Gateway, job_id: str, tenant: str) -> tuple[AnswerContext, JobStatus]:
    """Return a stored response's form, and how its job stands. Raises JobNotFound."""
    status = await gateway.client.status(job_id, tenant)
    try:
        job = await gateway.client.request(job_id, tenant)
    except JobGone:  # another route's, or not to be stored, or too old
        raise JobNotFound(job_id) from None
    return form_of(job, status.created_ms), status


async def _result(gateway: Gateway, status: JobStatus, tenant: str) -> Result | None:
    if status.ended_ms is None:
        return None
    return await gateway.client.result(status.job_id, wait=False, tenant=tenant)


async def _shown(gateway: Gateway, job_id: str, tenant: str) -> Response:
    form, status = await _stored(gateway, job_id, tenant)
    result = await _result(gateway, status, tenant)

    def made() -> Response:
        return _json(shown(form, status, result))

    num_bytes = 0 if result is None else num_bytes_of(result)
    return await gateway.client.off_loop.run(tenant, num_bytes, made)


async def _stays() -> None:
    """Do nothing when a reader leaves: the job is no request's own."""


def _json(shape: JsonValue) -> Response:
    return Response(to_json_in_pieces(shape), media_type="application/json")
