"""The routes that a model's tokenizer answers, without its engine."""

from collections.abc import Mapping
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.context import Open
from penstock.gateway.http.middleware import caller_of, span_of
from penstock.gateway.http.whole import read_asked, whole
from penstock.gateway.metrics.metrics import RequestTimer
from penstock.gateway.openai import texts
from penstock.gateway.openai.endpoints import RequestKind
from penstock.gateway.openai.texts import TextContext

router = APIRouter(tags=["tokenizer"])
info_router = APIRouter(tags=["tokenizer"])  # what a service tells only where it is set to
OF_TEXTS: Mapping[str, RequestKind[TextContext]] = {
    "/tokenize": RequestKind(texts.tokenize_form, texts.tokenize_answer),
    "/detokenize": RequestKind(texts.detokenize_form, texts.detokenize_answer),
    "/v1/chat/completions/render": RequestKind(texts.render_chat_form, texts.render_chat_answer),
    "/v1/completions/render": RequestKind(texts.render_text_form, texts.render_text_answer),
}


async def text(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    endpoint, caller = OF_TEXTS[request.url.path], caller_of(request)
    asked = await read_asked(request, gateway, lambda body: endpoint.form(caller, body, ""))
    gateway.tell_ignored(request, asked.ignored)
    card = (await gateway.client.models()).get(asked.job.model)
    asked = replace(asked, max_model_len=(card and card.max_model_len) or 0)
    return await whole(request, gateway, watch, asked, endpoint.shape)


@info_router.get("/tokenizer_info")
async def tokenizer_info(request: Request, gateway: Open, model: str | None = None) -> Response:
    """Tell the tokenizer's configuration, its chat template among it."""
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    name = model or await gateway.client.only_model()
    form = texts.describing_form(caller_of(request), name)
    return await whole(request, gateway, watch, form, texts.describing_answer)


for path in OF_TEXTS:
    router.add_api_route(
        path,
        text,
        methods=["POST"],
        name=path,
        operation_id=path.strip("/").replace("/", "_"),
    )
