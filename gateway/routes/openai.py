"""OpenAI's routes: chat, completions, models."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from penstock.gateway.auth.access import Caller
from penstock.gateway.http.body import read
from penstock.gateway.http.context import IDEMPOTENCY_KEY, LAST_EVENT_ID, Gateway, Open
from penstock.gateway.http.metrics import RequestTimer
from penstock.gateway.http.middleware import caller_of, span_of
from penstock.gateway.http.sse import EventStream
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.generate import TokenChunks, generate_answer, generate_form
from penstock.gateway.openai.responses import AnswerContext, chat_answer, model_shape, text_answer
from penstock.gateway.openai.stream import (
    NOTHING,
    ChatChunks,
    ReaderPosition,
    TextChunks,
)
from penstock.gateway.routes.whole import admitted, documented, events_of, whole, with_model
from penstock.schemas.errors import InvalidJob, ModelNotFound
from penstock.schemas.openai import ChatRequest, CompletionRequest, GenerateRequest, JsonObject
from penstock.schemas.sampling import SamplingParams

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, SamplingParams))
async def chat_completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await _read(request, gateway, chat_form)
    if form.is_streamed:
        return await _stream(request, gateway, watch, form, ChatChunks)
    return await whole(request, gateway, watch, form, chat_answer)


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest, SamplingParams))
async def completions(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await _read(request, gateway, text_form)
    if form.is_streamed:
        return await _stream(request, gateway, watch, form, TextChunks)
    return await whole(request, gateway, watch, form, text_answer)


@router.post("/inference/v1/generate", openapi_extra=documented(GenerateRequest))
async def generate(request: Request, gateway: Open) -> Response:
    """Answer tokens with tokens, as vLLM does."""
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    cards, caller = await gateway.client.models(), caller_of(request)
    form = await read(request, gateway, lambda body: generate_form(caller, with_model(cards, body)))
    gateway.tell_ignored(request, form.ignored)
    if form.is_streamed:
        return await _stream(request, gateway, watch, form, TokenChunks)
    return await whole(request, gateway, watch, form, generate_answer)


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


async def _read(
    request: Request, gateway: Gateway, read_form: Callable[[Caller, JsonObject], AnswerContext]
) -> AnswerContext:
    form = await read(request, gateway, partial(read_form, caller_of(request)))
    gateway.tell_ignored(request, form.ignored)
    card = (await gateway.client.models()).get(form.job.model)
    return replace(form, fingerprint=card.fingerprint) if card else form


async def _stream(
    request: Request,
    gateway: Gateway,
    watch: RequestTimer,
    form: AnswerContext,
    renderer: type[ChatChunks] | type[TextChunks] | type[TokenChunks],
) -> Response:
    position = _seen(request)
    if position != NOTHING:
        gateway.metrics.reconnects.inc()
    form = await admitted(request, gateway, form)
    leave = gateway.leaving(request, form.job)
    events = events_of(gateway, watch, form.job)
    return EventStream(events, leave, renderer(form, position), gateway.settings.ping_s)


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


def _json(shape: Mapping[str, object]) -> Response:
    return Response(to_json(shape), media_type="application/json")
