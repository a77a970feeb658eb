"""The endpoints that the lines of a batch may ask."""

from collections.abc import Mapping
from typing import Any

from penstock.gateway.anthropic.answers import message_answer
from penstock.gateway.anthropic.requests import messages_form
from penstock.gateway.openai import endpoints as openai
from penstock.gateway.openai.endpoints import RequestKind
from penstock.gateway.responses.answers import response_answer
from penstock.gateway.responses.requests import responses_form
from penstock.schemas.anthropic import MessagesRequest
from penstock.schemas.responses import ResponsesRequest

ENDPOINTS: Mapping[str, RequestKind[Any]] = {
    **openai.ENDPOINTS,
    "/v1/messages": RequestKind(MessagesRequest, messages_form, message_answer),
    "/v1/responses": RequestKind(ResponsesRequest, responses_form, response_answer),
}
