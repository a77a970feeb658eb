"""The endpoints that the lines of a batch may ask."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from penstock.gateway.anthropic.answers import error_answer, message_answer
from penstock.gateway.anthropic.requests import messages_form
from penstock.gateway.auth.access import Caller
from penstock.gateway.openai import endpoints as openai
from penstock.gateway.openai.endpoints import RequestKind
from penstock.gateway.openai.forms import chat_form
from penstock.gateway.openai.responses import AnswerContext, chat_answer, error
from penstock.gateway.openai.unsupported import refuse_unless
from penstock.gateway.responses.answers import response_answer
from penstock.gateway.responses.references import refuse_references
from penstock.gateway.responses.requests import responses_form
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.event import ErrorBody

# A line is answered in the batch's file, and knows no other.
_STORE_FIELDS: Mapping[str, tuple[JsonValue, ...]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": ("",),
}


def _response_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a line that asks for a response. Raises InvalidJob."""
    refuse_unless(_STORE_FIELDS, body, {})
    refuse_references(body)
    return responses_form(caller, {**body, "store": False}, job_id)


def _chat_form(caller: Caller, body: JsonObject, job_id: str = "") -> AnswerContext:
    """Read a line that asks for a chat. Raises InvalidJob."""
    refuse_unless({"store": (False,)}, body, {})
    return chat_form(caller, body, job_id)


ENDPOINTS: Mapping[str, RequestKind[Any]] = {
    **openai.ENDPOINTS,
    "/v1/chat/completions": RequestKind(_chat_form, chat_answer),
    "/v1/messages": RequestKind(messages_form, message_answer),
    "/v1/responses": RequestKind(_response_form, response_answer),
}


def error_in(url: str, body: ErrorBody) -> JsonObject:
    """Return an error in the form of an endpoint."""
    return error_answer(body) if url == "/v1/messages" else error(body)
