"""Answers to requests that a model answers at once: whole, or as a stream."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import Request, Response
from pydantic import JsonValue

from penstock.gateway.auth.access import Caller
from penstock.gateway.follow.lanes import only
from penstock.gateway.follow.large_texts import LARGE_BYTES
from penstock.gateway.follow.resumable import NOTHING, ReaderPosition
from penstock.gateway.http.body import read
from penstock.gateway.http.context import IDEMPOTENCY_KEY, LAST_EVENT_ID, Gateway
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.middleware import caller_of, span_of
from penstock.gateway.http.settings import GatewaySettings
from penstock.gateway.http.sse import EventStream, WholeAnswer, Writer
from penstock.gateway.metrics.metrics import RequestTimer
from penstock.gateway.openai.endpoints import Form
from penstock.gateway.openai.forms import STORED
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.responses import AnswerContext
from penstock.gateway.openai.texts import TextContext
from penstock.gateway.tasks.outbox import Note
from penstock.schemas.api.openai import JsonObject, StreamOptions
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Delta, Done, Event, Failed, Result
from penstock.schemas.job import Job
from penstock.schemas.result import fold

Asked = TypeVar("Asked")
Told = TypeVar("Told", AnswerContext, TextContext)
ALL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


async def admitted(request: Request, gateway: Gateway, form: Form) -> Form:
    """Submit the form's job; return the form with the job's id, and as the settings have it."""
    settings = gateway.settings
    job, created_s = await gateway.admit(
        request, form.job, await _note(gateway, form), _kept_s(form, settings)
    )
    form = replace(
        form,
        job=job,
        created_s=created_s,
        shows_metrics=form.shows_metrics or settings.enable_per_request_metrics,
    )
    if not isinstance(form, AnswerContext):
        return form
    if STORED in form.job.repeated:
        await gateway.stored_chats.add(form.job, settings.responses_kept_s)
    return replace(
        form,
        names_ids=form.names_ids or settings.return_tokens_as_token_ids,
        options=ALL_USAGE if settings.enable_force_include_usage else form.options,
    )


async def _note(gateway: Gateway, form: Form) -> str | None:
    """Return the note of a response, if anybody hears of its end: its webhooks, its conversation.

    Webhooks tell of what is made in the background.
    """
    if not isinstance(form, AnswerContext) or not form.is_kept:
        return None
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


def _kept_s(form: Form, settings: GatewaySettings) -> int | None:
    is_kept = isinstance(form, AnswerContext) and form.is_kept
    return settings.responses_kept_s if is_kept else None


def events_of(gateway: Gateway, watch: RequestTimer, job: Job) -> AsyncGenerator[list[Event], None]:
    """Return the job's events, which the timer sees pass where an engine makes them."""
    following = gateway.client.event_batches(job.job_id, tenant=job.tenant)
    return following if job.text is not None else watch.follow(job.model, following)


async def read_asked(
    request: Request, gateway: Gateway, understood: Callable[[JsonObject], Asked]
) -> Asked:
    """Read a body that asks a model. Where it names none, it asks the one that is served."""
    cards = await gateway.client.models()

    def named(body: JsonObject) -> Asked:
        return understood(body if body.get("model", "") != "" else {**body, "model": only(cards)})

    return await read(request, gateway, named)


async def read_form(
    request: Request, gateway: Gateway, read_body: Callable[[Caller, JsonObject], Told]
) -> Told:
    """Read the request's body as a form, and tell which of its fields are ignored."""
    form = await read_asked(request, gateway, partial(read_body, caller_of(request)))
    gateway.tell_ignored(request, form.ignored)
    if not isinstance(form, AnswerContext):
        return form
    card = (await gateway.client.models()).get(form.job.model)
    return replace(form, fingerprint=card.fingerprint) if card else form


async def answered(
    request: Request,
    gateway: Gateway,
    read_body: Callable[[Caller, JsonObject], AnswerContext],
    renderer: Callable[[AnswerContext, ReaderPosition], Writer],
    shape: Callable[[AnswerContext, Result], JsonValue],
) -> Response:
    """Answer a request as a stream, where it asks for one, or whole."""
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await read_form(request, gateway, read_body)
    if form.is_streamed:
        return await streamed(request, gateway, watch, form, renderer)
    return await whole(request, gateway, watch, form, shape)


async def streamed(
    request: Request,
    gateway: Gateway,
    watch: RequestTimer,
    form: AnswerContext,
    renderer: Callable[[AnswerContext, ReaderPosition], Writer],
) -> Response:
    """Submit the form's job, and answer with its events as the renderer writes them."""
    position = _seen(request)
    if position != NOTHING:
        gateway.metrics.reconnects.inc()
    form = await admitted(request, gateway, form)
    leave = gateway.leaving(request, form.job)
    events = events_of(gateway, watch, form.job)
    stream = EventStream(events, leave, renderer(form, position), gateway.settings.ping_s)
    return gateway.reading(request, stream)


def _seen(request: Request) -> ReaderPosition:
    """Return what the caller has already of a stream that it comes back to.

    It comes back under its idempotency key. Raises InvalidJob where it gives none.
    """
    last_event_id = request.headers.get(LAST_EVENT_ID)
    if last_event_id is None:
        return NOTHING
    if IDEMPOTENCY_KEY not in request.headers:
        sentence = "resumes a stream that was asked under an Idempotency-Key; give that one too"
        raise InvalidJob(f"Last-Event-ID: {sentence}", "Last-Event-ID")
    return ReaderPosition.parse(last_event_id, "Last-Event-ID")


async def whole(
    request: Request,
    gateway: Gateway,
    watch: RequestTimer,
    form: Form,
    shape: Callable[[Form, Result], JsonValue],
) -> Response:
    """Submit the form's job, and answer with what `shape` makes of its result."""
    form = await admitted(request, gateway, form)
    job = form.job

    def made(deltas: list[Delta], end: Done | Failed) -> Response:
        result = fold(job.job_id, job.model, job.num_choices, deltas, end)
        if isinstance(end, Done):
            body = to_json_in_pieces(shape(form, result))
            return Response(body, media_type="application/json")
        so_far: JsonObject = {"partial": shape(form, result)} if deltas else {}
        told = {"job_id": job.job_id, **so_far}
        return error_response(end.error, more=told, path=request.url.path)

    async def answered(deltas: list[Delta], end: Done | Failed) -> Response:
        num_scored = sum(len(delta.prompt_logprobs or ()) for delta in deltas)
        num_bytes = job.answer_bytes(end.position, num_scored) // 8
        return await gateway.client.off_loop.run(job.tenant, num_bytes, made, deltas, end)

    leave = gateway.leaving(request, job)
    return gateway.reading(request, WholeAnswer(events_of(gateway, watch, job), leave, answered))
