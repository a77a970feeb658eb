"""The routes that make vectors of texts: embeddings, classification, scores, reranking."""

from fastapi import APIRouter, Request, Response

from penstock.gateway.admission.forms import read_asked
from penstock.gateway.http.body import HttpBody
from penstock.gateway.http.middleware import Open, caller_of
from penstock.gateway.http.whole import whole
from penstock.gateway.openai.endpoints import OF_VECTORS

router = APIRouter(tags=["pooling"])


async def pool(request: Request, gateway: Open) -> Response:
    endpoint, caller = OF_VECTORS[request.url.path], caller_of(request)
    body = HttpBody(request, gateway)
    form = await read_asked(gateway, body, lambda fields: endpoint.form(caller, fields, ""))
    return await whole(request, gateway, form, endpoint.shape)


for path in OF_VECTORS:
    router.add_api_route(
        path,
        pool,
        methods=["POST"],
        name=path,
        operation_id=path.strip("/").replace("/", "_"),
    )
