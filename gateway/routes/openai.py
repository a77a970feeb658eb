"""OpenAI's routes: chat, completions, models."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.http.body import read
from penstock.gateway.http.context import IDEMPOTENCY_KEY, LAST_EVENT_ID, Gateway, Open
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.metrics import RequestTimer
from penstock.gateway.http.middleware import caller_of
from penstock.gateway.http.sse import EventStream, WholeAnswer
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.large_json import to_json_in_pieces
from penstock.gateway.openai.responses import AnswerContext, chat_answer, model_shape, text_answer
from penstock.gateway.openai.stream import (
    NOTHING,
    ChatChunks,
    ReaderPosition,
    StreamRenderer,
    TextChunks,
)
from penstock.schemas.errors import InvalidJob, ModelNotFound
from penstock.schemas.event import Delta, Done, Failed, Result
from penstock.schemas.openai import ChatRequest, CompletionRequest, JsonObject
from penstock.schemas.result import fold
from penstock.schemas.sampling import SamplingParams

router = APIRouter(tags=["openai"])


def _documented(asked: type[BaseModel]) -> dict[str, object]:
    """Describe a body for /docs; what checks it (`gateway.openai.validation`) says more."""
    schema = {"allOf": [asked.model_json_schema(), SamplingParams.model_json_schema()]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
async def chat_completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics)
    form = await _form(request, gateway, chat_form)
    if form.is_streamed:
        return await _stream(request, gateway, watch, ChatChunks(form, _seen(request)))
    return await _whole(request, gateway, watch, form, chat_answer)


@router.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
async def completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics)
    form = await _form(request, gateway, text_form)
    if form.is_streamed:
        return await _stream(request, gateway, watch, TextChunks(form, _seen(request)))
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


async def _form(
    request: Request, gateway: Gateway, understood: Callable[[Caller, JsonObject], AnswerContext]
) -> AnswerContext:
    """What the request asks, its job under its name."""
    form = await read(request, gateway, partial(understood, caller_of(request)))
    return replace(form, job=await gateway.named(request, form.job))


async def _stream(
    request: Request, gateway: Gateway, watch: RequestTimer, chunks: StreamRenderer
) -> Response:
    job = chunks.form.job
    await gateway.submit(request, job)
    batches = watch.follow(job.model, gateway.client.batches(job.job_id, tenant=job.tenant))
    leave = gateway.leaving(request, job)
    return EventStream(batches, leave, chunks, gateway.settings.ping_s)


def _seen(request: Request) -> ReaderPosition:
    """What a caller has who comes back to a stream: under its idempotency key."""
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

    await gateway.submit(request, job)
    batches = watch.follow(job.model, gateway.client.batches(job.job_id, tenant=job.tenant))
    return WholeAnswer(batches, gateway.leaving(request, job), answered)


def _json(shape: Mapping[str, object]) -> Response:
    return Response(to_json(shape), media_type="application/json")
