"""The routes that a model's tokenizer answers, without its engine."""

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from penstock.gateway.admission.forms import read_form
from penstock.gateway.http.body import HttpBody
from penstock.gateway.http.middleware import Open, ask_of, caller_of
from penstock.gateway.http.whole import whole
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
    endpoint, body = OF_TEXTS[request.url.path], HttpBody(request, gateway)
    form = await read_form(
        gateway, ask_of(request), body, lambda caller, fields: endpoint.form(caller, fields, "")
    )
    return await whole(request, gateway, form, endpoint.shape)


@info_router.get("/tokenizer_info")
async def tokenizer_info(request: Request, gateway: Open, model: str | None = None) -> Response:
    """Tell the tokenizer's configuration, its chat template among it."""
    name = model or await gateway.client.only_model()
    form = texts.describing_form(caller_of(request), name)
    return await whole(request, gateway, form, texts.describing_answer)


for path in OF_TEXTS:
    router.add_api_route(
        path,
        text,
        methods=["POST"],
        name=path,
        operation_id=path.strip("/").replace("/", "_"),
    )
