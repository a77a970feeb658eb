"""Requests that a model answers at once: what they ask is read, and submitted as a job."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.gateway.admission.ask import Answering, Ask, Body, T
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.access import Caller
from penstock.gateway.follow.lanes import only
from penstock.gateway.follow.large_texts import LARGE_BYTES
from penstock.gateway.openai.endpoints import Form
from penstock.gateway.openai.forms import CHAT_KEY
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.texts import TextContext
from penstock.gateway.tasks.outbox import Note
from penstock.schemas.api.openai import JsonObject, StreamOptions

ReadForm = TypeVar("ReadForm", AnswerContext, TextContext)
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


async def read_asked(gateway: Gateway, body: Body, understood: Callable[[JsonObject], T]) -> T:
    """Read a body that asks a model. Where it names none, it asks the one that is served."""
    cards = await gateway.client.models()

    def named(fields: JsonObject) -> T:
        has_model = fields.get("model", "") != ""
        return understood(fields if has_model else {**fields, "model": only(cards)})

    return await body.read(named)


async def read_form(
    gateway: Gateway,
    ask: Ask,
    body: Body,
    read_fields: Callable[[Caller, JsonObject], ReadForm],
) -> ReadForm:
    """Read a request as a form, and tell which of its fields are ignored."""
    form = await read_asked(gateway, body, partial(read_fields, ask.caller))
    gateway.tell_ignored(ask, form.ignored_names)
    card = (await gateway.client.models()).get(form.job.model)
    if card is None:
        return form
    if isinstance(form, AnswerContext):
        return replace(form, fingerprint=card.fingerprint)
    return replace(form, max_model_len=card.max_model_len or 0)


async def submit(gateway: Gateway, ask: Ask, form: Form) -> tuple[Form, Answering]:
    """Submit the form's job; return the form with the job's id, and as the settings have it."""
    settings = gateway.settings
    note, kept_s = None, None
    if isinstance(form, AnswerContext) and form.is_kept:
        note, kept_s = await _note(gateway, form), settings.responses_kept_s
    stream = await gateway.admit(ask, form.job, note, kept_s)
    form = replace(
        form,
        job=form.job.model_copy(update={"job_id": stream.job_id}),
        created_s=stream.created_s,
        shows_metrics=form.shows_metrics or settings.enable_per_request_metrics,
    )
    if not isinstance(form, AnswerContext):
        return form, stream
    if CHAT_KEY in form.job.repeated:
        await gateway.stored_chats.add(form.job, settings.responses_kept_s)
    form = replace(
        form,
        names_ids=form.names_ids or settings.return_tokens_as_token_ids,
        options=ALL_USAGE if settings.enable_force_include_usage else form.options,
    )
    return form, stream


async def _note(gateway: Gateway, form: AnswerContext) -> str | None:
    """Return the note of a response, if anybody hears of its end: its webhooks, its conversation.

    Webhooks tell of what is made in the background.
    """
    inside = form.job.repeated.get("conversation")
    conversation = f"{inside['id']}" if isinstance(inside, dict) else None
    is_told = form.job.background and await gateway.webhooks.has_endpoints(form.job.tenant)
    is_large = gateway.client.texts is not None and form.job.guess_bytes() > LARGE_BYTES
    if not is_told and not is_large and conversation is None:
        return None
    note = Note(
        webhook="" if is_told else None,
        conversation=conversation,
        is_large=is_large,
        is_response=is_told,
    )
    return note.dump()
