"""OpenAI's routes: chat, completions, models."""

from collections.abc import Callable, Mapping

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from gateway.answers import Form, chat_answer, model_shape, text_answer
from gateway.body import read_object
from gateway.chunks import ChatChunks, Chunks, Seen, TextChunks
from gateway.errors import error_response
from gateway.gate import caller_of
from gateway.gateway import IDEMPOTENCY_KEY, LAST_EVENT_ID, Gateway, Open, cursor_of
from gateway.intake import chat_job, prompts_of, text_job
from gateway.metrics import Watch
from gateway.shape import checked
from gateway.sse import EventStream, WholeAnswer
from gateway.tool_calls import PlainText, reader_for
from schemas.errors import InvalidJob, ModelNotFound
from schemas.event import Delta, Done, Failed, Result
from schemas.openai import ChatRequest, CompletionRequest, JsonObject
from schemas.result import fold
from schemas.sampling import SamplingParams

router = APIRouter(tags=["openai"])


def _documented(asked: type[BaseModel]) -> dict[str, object]:
    """For /docs alone: `gateway.shape` checks bodies, and says more when one is wrong."""
    schema = {"allOf": [asked.model_json_schema(), SamplingParams.model_json_schema()]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
async def chat_completions(request: Request, gateway: Open) -> Response:
    watch = Watch(gateway.metrics)
    body = await read_object(request, gateway.settings.max_body_bytes)
    asked = checked(ChatRequest, body)
    job_id = await gateway.name_job(request, asked.model)
    job = chat_job(job_id, caller_of(request), asked, body)
    form = Form(job, asked.stream_options, reader_for(asked))
    if asked.stream:
        return await _stream(request, gateway, watch, ChatChunks(form, _seen(request)))
    return await _whole(request, gateway, watch, form, chat_answer)


@router.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
async def completions(request: Request, gateway: Open) -> Response:
    watch = Watch(gateway.metrics)
    body = await read_object(request, gateway.settings.max_body_bytes)
    asked = checked(CompletionRequest, body)
    job_id = await gateway.name_job(request, asked.model)
    job = text_job(job_id, caller_of(request), asked, body)
    echo = [str(prompt) for prompt in prompts_of(asked)] if asked.echo else []
    form = Form(job, asked.stream_options, PlainText, echo)
    if asked.stream:
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


async def _stream(request: Request, gateway: Gateway, watch: Watch, chunks: Chunks) -> Response:
    job = chunks.form.job
    await gateway.submit(request, job)
    batches = watch.follow(job.model, gateway.client.batches(job.job_id, tenant=job.tenant))
    leave = gateway.leaving(request, job)
    return EventStream(batches, leave, chunks.render, gateway.settings.ping_s)


def _seen(request: Request) -> Seen:
    """What a caller has who comes back to a stream: under its idempotency key."""
    last_event_id = request.headers.get(LAST_EVENT_ID)
    if last_event_id is None:
        return 0, 0
    if IDEMPOTENCY_KEY not in request.headers:
        sentence = "resumes a stream that was asked under an Idempotency-Key; give that one too"
        raise InvalidJob(f"Last-Event-ID: {sentence}", "Last-Event-ID")
    tokens, _, chunks = last_event_id.partition(".")
    return cursor_of(tokens), cursor_of(chunks or "0")


async def _whole(
    request: Request,
    gateway: Gateway,
    watch: Watch,
    form: Form,
    shape: Callable[[Form, Result], JsonObject],
) -> Response:
    job = form.job

    def answered(deltas: list[Delta], end: Done | Failed) -> Response:
        result = fold(job.job_id, job.model, job.num_choices, deltas, end)
        if isinstance(end, Done):
            return _json(shape(form, result))
        so_far: JsonObject = {"partial": shape(form, result)} if deltas else {}
        return error_response(end.error, more={"job_id": job.job_id, **so_far})

    await gateway.submit(request, job)
    batches = watch.follow(job.model, gateway.client.batches(job.job_id, tenant=job.tenant))
    return WholeAnswer(batches, gateway.leaving(request, job), answered)


def _json(shape: Mapping[str, object]) -> Response:
    return Response(to_json(shape), media_type="application/json")
