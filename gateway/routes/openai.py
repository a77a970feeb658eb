"""OpenAI's routes: chat, completions, models."""

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from penstock.gateway.http.body import read
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, tenant_of
from penstock.gateway.http.whole import answered
from penstock.gateway.openai.forms import chat_form, text_form
from penstock.gateway.openai.generate import TokenChunks, generate_answer, generate_form
from penstock.gateway.openai.responses import chat_answer, model_shape, text_answer
from penstock.gateway.openai.stream import ChatChunks, TextChunks
from penstock.schemas.api.openai import AbortRequest
from penstock.schemas.errors import JobGone, JobNotFound, ModelNotFound
from penstock.schemas.keys import JOB_ID

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, gateway: Open) -> Response:
    return await answered(request, gateway, chat_form, ChatChunks, chat_answer)


@router.post("/v1/completions")
async def completions(request: Request, gateway: Open) -> Response:
    return await answered(request, gateway, text_form, TextChunks, text_answer)


@router.post("/inference/v1/generate")
async def generate(request: Request, gateway: Open) -> Response:
    """Answer tokens with tokens, as vLLM does."""
    return await answered(request, gateway, generate_form, TokenChunks, generate_answer)


@router.post("/abort_requests")
@router.post("/inference/v1/abort_requests")
async def abort_requests(request: Request, gateway: Open) -> Response:
    """Cancel the jobs of answers, by the answers' ids. One that is not known or has ended stays."""
    body = await read(request, gateway, AbortRequest)
    matches = [JOB_ID.search(request_id) for request_id in body.request_ids]
    job_ids = []
    for job_id in dict.fromkeys(match[0] for match in matches if match):
        with suppress(JobNotFound, JobGone):
            status = await gateway.client.cancel(job_id, tenant_of(request))
            job_ids += [job_id] if status.ended_ms is None or status.state == "cancelled" else []
    return json_response({"aborted": job_ids})


@router.get("/v1/models")
async def models(
    gateway: Open,
    all: Annotated[bool, Query(description="those that no worker serves now, too")] = False,
) -> Response:
    """List the models that are served, first those that answer chats and completions."""
    cards, num_workers = await gateway.client.models(), await gateway.overview.num_workers()
    shown_cards = [card for card in cards.values() if all or num_workers.get(card.name)]
    shown_cards.sort(key=lambda card: (card.task != "generate", card.name))
    shapes = [model_shape(card, num_workers.get(card.name, 0)) for card in shown_cards]
    return json_response({"object": "list", "data": shapes})


@router.get("/v1/models/{name:path}")
async def model(name: str, gateway: Open) -> Response:
    cards, num_workers = await gateway.client.models(), await gateway.overview.num_workers()
    if name not in cards:
        raise ModelNotFound(name, list(cards))
    return json_response(model_shape(cards[name], num_workers.get(name, 0)))
