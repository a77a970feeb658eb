"""The description of the API: as OpenAPI's JSON, and as a page of this server alone."""

import asyncio
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from penstock.gateway.http.middleware import Open
from penstock.gateway.routes.page import PAGE, file_of

# Swagger UI writes styles into its elements, and draws its signs as data: URLs.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> Response:
    return file_of((PAGE / "docs.html").read_bytes(), "text/html; charset=utf-8", POLICY)


@router.get("/docs/docs.js")
async def script() -> Response:
    return file_of((PAGE / "docs.js").read_bytes(), "text/javascript; charset=utf-8", POLICY)


@router.get("/docs/swagger-ui-bundle.js")
async def swagger() -> Response:
    return await _of_swagger("swagger-ui-bundle.js", "text/javascript; charset=utf-8")


@router.get("/docs/swagger-ui.css")
async def swagger_style() -> Response:
    return await _of_swagger("swagger-ui.css", "text/css; charset=utf-8")


@router.get("/openapi.json")
async def openapi(request: Request, gateway: Open) -> Response:
    app = request.app

    def made() -> bytes:
        from penstock.gateway.described.description import description_of  # few ask for it

        return to_json(description_of(app, gateway.settings.root_path))

    if not hasattr(app.state, "description"):
        app.state.description = await asyncio.to_thread(made)
    return Response(app.state.description, media_type="application/json")


async def _of_swagger(name: str, media_type: str) -> Response:
    whole = files("fastapi_swagger") / "resources" / name
    return file_of(await asyncio.to_thread(whole.read_bytes), media_type, POLICY)
