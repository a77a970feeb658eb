"""OpenAI's routes: chat, completions, models."""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from penstock.gateway.http.body import read
from penstock.gateway.http.context import IDEMPOTENCY_KEY, LAST_EVENT_ID, Gateway, Open
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.metrics import RequestTimer
from penstock.gateway.http.middleware import caller_of, span_of
from penstock.gateway.http.sse import EventStream, WholeAnswer
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.responses import AnswerContext, chat_answer, model_shape, text_answer
from penstock.gateway.openai.stream import (
    NOTHING,
    ChatChunks,
    ReaderPosition,
    TextChunks,
)
from penstock.schemas.errors import InvalidJob, ModelNotFound
from penstock.schemas.event import Delta, Done, Event, Failed, Result
from penstock.schemas.job import Job
from penstock.schemas.openai import ChatRequest, CompletionRequest, JsonObject
from penstock.schemas.result import fold
from penstock.schemas.sampling import SamplingParams

router = APIRouter(tags=["openai"])


def _documented(asked: type[BaseModel]) -> dict[str, object]:
    """Describe a body for /docs. Its checks, in `gateway.openai.validation`, say more."""
    schema = {"allOf": [asked.model_json_schema(), SamplingParams.model_json_schema()]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
async def chat_completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await read(request, gateway, partial(chat_form, caller_of(request)))
    if form.is_streamed:
        return await _stream(request, gateway, watch, form, ChatChunks)
    return await _whole(request, gateway, watch, form, chat_answer)


@router.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
async def completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await read(request, gateway, partial(text_form, caller_of(request)))
    if form.is_streamed:
        return await _stream(request, gateway, watch, form, TextChunks)
    return await _whole(request, gateway, watch, form, text_answer)


@router.get("/v1/models")
async def models(gateway: Open) -> Response:
    cards = await gateway.client.models()
    shapes = [model_shape(card) for _, card in sorted(cards.items())]
    return _json({"object": "list", "data": shapes})


@router.get("/v1/models/{name:path}")
async def model(name: str, gateway: Open) -> Response:
    cards = await gateway.client.models()
    if name not in cards:
        raise ModelNotFound(name, list(cards))
    return _json(model_shape(cards[name]))


async def _stream(
    request: Request,
    gateway: Gateway,
    watch: RequestTimer,
    form: AnswerContext,
    renderer: type[ChatChunks] | type[TextChunks],
) -> Response:
    position = _seen(request)
    if position != NOTHING:
        gateway.metrics.reconnects.inc()
    form = await _admitted(request, gateway, form)
    leave = gateway.leaving(request, form.job)
    events = _events(gateway, watch, form.job)
    return EventStream(events, leave, renderer(form, position), gateway.settings.ping_s)


async def _admitted(request: Request, gateway: Gateway, form: AnswerContext) -> AnswerContext:
    return replace(
        form,
        job=await gateway.admit(request, form.job),
        shows_metrics=form.shows_metrics or gateway.settings.enable_per_request_metrics,
    )


def _events(gateway: Gateway, watch: RequestTimer, job: Job) -> AsyncGenerator[list[Event], None]:
    following = gateway.client.event_batches(job.job_id, tenant=job.tenant)
    return watch.follow(job.model, following)


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


async def _whole(
    request: Request,
    gateway: Gateway,
    watch: RequestTimer,
    form: AnswerContext,
    shape: Callable[[AnswerContext, Result], JsonObject],
) -> Response:
    form = await _admitted(request, gateway, form)
    job = form.job

    def made(deltas: list[Delta], end: Done | Failed) -> Response:
        result = fold(job.job_id, job.model, job.num_choices, deltas, end)
        if isinstance(end, Done):
            body = to_json_in_pieces(shape(form, result))
            return Response(body, media_type="application/json")
        so_far: JsonObject = {"partial": shape(form, result)} if deltas else {}
        return error_response(end.error, more={"job_id": job.job_id, **so_far})

    async def answered(deltas: list[Delta], end: Done | Failed) -> Response:
        num_bytes = job.answer_bytes_a_token() * end.position // 8
        return await gateway.client.off_loop.run(num_bytes, made, deltas, end)

    leave = gateway.leaving(request, job)
    return WholeAnswer(_events(gateway, watch, job), leave, answered)


def _json(shape: Mapping[str, object]) -> Response:
    return Response(to_json(shape), media_type="application/json")
