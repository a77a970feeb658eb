"""OpenAI's route for responses."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.context import Open
from penstock.gateway.http.metrics import RequestTimer
from penstock.gateway.http.middleware import span_of
from penstock.gateway.responses.answers import ResponseEvents, response_answer
from penstock.gateway.responses.requests import responses_form
from penstock.gateway.routes.whole import documented, read_form, streamed, whole
from penstock.schemas.responses import ResponsesRequest
from penstock.schemas.sampling import SamplingParams

router = APIRouter(tags=["openai"])


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest, SamplingParams))
async def responses(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    form = await read_form(request, gateway, responses_form)
    if form.is_streamed:
        return await streamed(request, gateway, watch, form, ResponseEvents)
    return await whole(request, gateway, watch, form, response_answer)
