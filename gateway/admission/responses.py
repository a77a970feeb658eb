"""Requests for responses, read with what was said before them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from penstock.gateway.admission.ask import Ask, Body, T
from penstock.gateway.admission.forms import read_asked
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.openai.responses import AnswerContext, num_bytes_of
from penstock.gateway.responses.conversation import Conversation, ConversationLocked
from penstock.gateway.responses.conversations import messages_of
from penstock.gateway.responses.references import ReferredItems, references_of
from penstock.gateway.responses.requests import conversation_id_of, request_items, responses_form
from penstock.gateway.responses.stored import conversation, form_of, job_id_of
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
from penstock.schemas.job import Message
from penstock.schemas.keys import CONVERSATION_ID


class PreviousNotFound(InvalidJob):
    """Raised where a response is unknown, or is known to another connection alone."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        name = "previous_response_id"
        super().__init__(f"{name}: {response_id[:80]!r} is not found; send all that was said", name)


async def read_with_items(
    gateway: Gateway, ask: Ask, body: Body, understood: Callable[[JsonObject], T]
) -> T:
    """Read a body, with the stored items that it refers to. Raises InvalidJob."""
    tenant, most_bytes = ask.caller.tenant, gateway.settings.max_body_bytes

    def begun(fields: JsonObject) -> T | ReferredItems:
        references = references_of(fields)
        return ReferredItems(fields, references, most_bytes) if references else understood(fields)

    items = await read_asked(gateway, body, begun)
    if not isinstance(items, ReferredItems):
        return items
    for source in items.sources:
        with suppress(JobNotFound):  # its items are missed where they are referred to
            if CONVERSATION_ID.fullmatch(source):
                conversation = await gateway.conversations.read(tenant, source)
                await gateway.client.off_loop.run(
                    tenant, conversation.num_bytes, items.take, conversation.items
                )
                continue
            form, status = await stored_form(gateway, source, tenant)
            result = await result_of(gateway, status, tenant)
            num_bytes = form.job.guess_bytes() + (num_bytes_of(result) if result else 0)
            await gateway.client.off_loop.run(
                tenant, num_bytes, items.take_response, form, status, result
            )
    return await gateway.client.off_loop.run(
        tenant, most_bytes, lambda: understood(items.whole_body())
    )


async def read_response(
    gateway: Gateway, ask: Ask, body: Body, before: Sequence[Message] | None = None
) -> tuple[AnswerContext, Conversation | None]:
    """Read a request, with what was said before it.

    The second value is the conversation in which it is noted from now on, if it is.

    before  what was said, where the connection knows it and the request goes on with it
    """

    def understood(fields: JsonObject) -> tuple[JsonObject, str, AnswerContext | list[JsonObject]]:
        name = conversation_id_of(fields)
        if before is not None:
            return fields, name, responses_form(ask.caller, fields, before=before)
        if name:
            return fields, name, request_items(fields)
        if fields.get("previous_response_id"):
            return fields, "", []
        return fields, "", responses_form(ask.caller, fields)

    fields, name, form = await read_with_items(gateway, ask, body, understood)
    noted_in = None
    if isinstance(form, list):
        if name:
            form, noted_in = await _in_conversation(gateway, ask, fields, form, name)
        else:
            form = await _going_on(gateway, ask, fields)
    gateway.tell_ignored(ask, form.ignored_names)
    return form, noted_in


async def _in_conversation(
    gateway: Gateway, ask: Ask, fields: JsonObject, items: list[JsonObject], name: str
) -> tuple[AnswerContext, Conversation | None]:
    """Read a request with the conversation that it names, and note it there.

    A request that is repeated under its idempotency key is noted already.
    """
    caller, model = ask.caller, f"{fields['model']}"
    job_id = await gateway.client.name_job(
        model, ask.idempotency_key, caller.tenant, caller.account
    )
    conversation = await gateway.conversations.read(caller.tenant, name)
    ids = [entry.job_id for entry in conversation.entries]
    is_noted = job_id in ids
    if conversation.is_open and not is_noted:
        raise ConversationLocked
    before = conversation.entries[: ids.index(job_id)] if is_noted else conversation.entries

    def made() -> AnswerContext:
        return responses_form(caller, fields, job_id, messages_of(before), name)

    # As much as the two may have.
    num_bytes = gateway.settings.max_body_bytes
    form = await gateway.client.off_loop.run(caller.tenant, num_bytes, made)
    if is_noted:
        return form, None
    await gateway.conversations.begin(conversation, job_id, items, gateway.most_stored(ask))
    return form, conversation


@asynccontextmanager
async def given_up_if_refused(
    gateway: Gateway, form: AnswerContext, noted_in: Conversation | None
) -> AsyncIterator[None]:
    """Take a request out of its conversation again if its job is refused."""
    try:
        yield
    except QueueUnreachable:
        raise  # it may be submitted: the conversation finds out
    except PenstockError:
        if noted_in is not None:
            await gateway.conversations.give_up(noted_in, form.job.job_id)
        raise


async def _going_on(gateway: Gateway, ask: Ask, fields: JsonObject) -> AnswerContext:
    """Read the body of a request that goes on with a stored response."""
    tenant, previous = ask.caller.tenant, f"{fields['previous_response_id']}"
    try:
        job_id = job_id_of(previous, "previous_response_id")
        form, status = await stored_form(gateway, job_id, tenant)
    except (InvalidJob, JobNotFound):  # another server's id is unknown here too
        raise PreviousNotFound(previous) from None
    result = await result_of(gateway, status, tenant)

    def made() -> AnswerContext:
        return responses_form(ask.caller, fields, before=conversation(form, result))

    num_bytes = gateway.settings.max_body_bytes  # as much as the two may have
    return await gateway.client.off_loop.run(tenant, num_bytes, made)


async def stored_form(
    gateway: Gateway, job_id: str, tenant: str
) -> tuple[AnswerContext, JobStatus]:
    """Return a stored response's form, and how its job stands. Raises JobNotFound."""
    status = await gateway.client.status(job_id, tenant)
    try:
        job = await gateway.client.request(job_id, tenant)
    except JobGone:  # another route's, or not to be stored, or too old
        raise JobNotFound(job_id) from None
    return form_of(job, status.created_ms), status


async def result_of(gateway: Gateway, status: JobStatus, tenant: str) -> Result | None:
    if status.ended_ms is None:
        return None
    return await gateway.client.result(status.job_id, wait=False, tenant=tenant)
