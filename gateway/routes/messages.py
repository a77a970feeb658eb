"""Anthropic's routes: messages, and how many tokens they have."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.admission.forms import read_form
from penstock.gateway.anthropic.answers import MessageEvents, count_answer, message_answer
from penstock.gateway.anthropic.requests import count_form, messages_form
from penstock.gateway.http.body import HttpBody
from penstock.gateway.http.middleware import Open, ask_of
from penstock.gateway.http.whole import answered, whole

router = APIRouter(tags=["anthropic"])


@router.post("/v1/messages")
async def messages(request: Request, gateway: Open) -> Response:
    return await answered(request, gateway, messages_form, MessageEvents, message_answer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, gateway: Open) -> Response:
    form = await read_form(gateway, ask_of(request), HttpBody(request, gateway), count_form)
    return await whole(request, gateway, form, count_answer)
