"""The routes that make vectors of texts: embeddings, classification, scores, reranking."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.context import Open
from penstock.gateway.http.middleware import caller_of, span_of
from penstock.gateway.http.whole import read_asked, whole
from penstock.gateway.metrics.metrics import RequestTimer
from penstock.gateway.openai.endpoints import OF_VECTORS

router = APIRouter(tags=["pooling"])


async def pool(request: Request, gateway: Open) -> Response:
    watch = RequestTimer(gateway.metrics, span_of(request.scope))
    endpoint, caller = OF_VECTORS[request.url.path], caller_of(request)
    form = await read_asked(request, gateway, lambda body: endpoint.form(caller, body, ""))
    return await whole(request, gateway, watch, form, endpoint.shape)


for path in OF_VECTORS:
    router.add_api_route(
        path,
        pool,
        methods=["POST"],
        name=path,
        operation_id=path.strip("/").replace("/", "_"),
    )
