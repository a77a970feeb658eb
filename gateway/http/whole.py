"""Answers to requests that a model answers at once: whole, or as a stream."""

from collections.abc import Callable

from fastapi import Request, Response
from pydantic import JsonValue

from penstock.gateway.admission.ask import Ask
from penstock.gateway.admission.forms import read_form, submit
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.access import Caller
from penstock.gateway.follow.resumable import START, ReaderPosition
from penstock.gateway.http.body import HttpBody
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import LAST_EVENT_ID, ask_of
from penstock.gateway.http.sse import EventStream, WholeAnswer, Writer
from penstock.gateway.openai.endpoints import Form
from penstock.gateway.openai.responses import AnswerContext
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import InvalidJob
from penstock.schemas.event import Delta, Done, Failed, Result
from penstock.schemas.result import fold


async def answered(
    request: Request,
    gateway: Gateway,
    read_fields: Callable[[Caller, JsonObject], AnswerContext],
    renderer: Callable[[AnswerContext, ReaderPosition], Writer],
    shape: Callable[[AnswerContext, Result], JsonValue],
) -> Response:
    """Answer a request as a stream, where it asks for one, or whole."""
    body = HttpBody(request, gateway)
    form = await read_form(gateway, ask_of(request), body, read_fields)
    if form.is_streamed:
        return await streamed(request, gateway, form, renderer)
    return await whole(request, gateway, form, shape)


async def streamed(
    request: Request,
    gateway: Gateway,
    form: AnswerContext,
    renderer: Callable[[AnswerContext, ReaderPosition], Writer],
) -> Response:
    """Submit the form's job, and answer with its events as the renderer writes them."""
    ask, position = ask_of(request), START
    if (last_event_id := request.headers.get(LAST_EVENT_ID)) is not None:
        position = _seen(ask, last_event_id)
        if position != START:
            gateway.metrics.reconnects.inc()
    form, stream = await submit(gateway, ask, form)
    return EventStream(stream, renderer(form, position), gateway.settings.ping_s)


def _seen(ask: Ask, last_event_id: str) -> ReaderPosition:
    """Return what the caller has already of a stream that it comes back to.

    It comes back under its idempotency key. Raises InvalidJob where it gives none.
    """
    if ask.idempotency_key is None:
        sentence = "resumes a stream that was asked under an Idempotency-Key; give that one too"
        raise InvalidJob(f"Last-Event-ID: {sentence}", "Last-Event-ID")
    return ReaderPosition.parse(last_event_id, "Last-Event-ID")


async def whole(
    request: Request,
    gateway: Gateway,
    form: Form,
    shape: Callable[[Form, Result], JsonValue],
) -> Response:
    """Submit the form's job, and answer with what `shape` makes of its result."""
    form, stream = await submit(gateway, ask_of(request), form)
    job = form.job

    def made(deltas: list[Delta], end: Done | Failed) -> Response:
        result = fold(job.job_id, job.model, job.num_choices, deltas, end)
        if isinstance(end, Done):
            return json_response(shape(form, result))
        so_far: JsonObject = {"partial": shape(form, result)} if deltas else {}
        fields = {"job_id": job.job_id, **so_far}
        return error_response(end.error, more=fields, path=request.url.path)

    async def answered(deltas: list[Delta], end: Done | Failed) -> Response:
        num_scored = sum(len(delta.prompt_logprobs or ()) for delta in deltas)
        num_bytes = job.answer_bytes(end.position, num_scored) // 8
        return await gateway.client.off_loop.run(job.tenant, num_bytes, made, deltas, end)

    return WholeAnswer(stream, answered)
