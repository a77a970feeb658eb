"""The status page, and what it shows: once, or as a stream of events."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from penstock.gateway.http.middleware import Open, caller_of
from penstock.gateway.http.sse import HEADERS
from penstock.schemas.errors import QueueUnreachable

EVERY_S = 1.0
PAGE = Path(__file__).parents[1] / "page"
# The page is ours alone: nothing is loaded from elsewhere, and nobody may frame it.
POLICY = (
    "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
router = APIRouter(tags=["page"])


def file_of(content: bytes, media_type: str, policy: str = POLICY) -> Response:
    """Answer with a page's file. `policy` says what a browser may load for it."""
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(content, media_type=media_type, headers=headers)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return file_of((PAGE / "index.html").read_bytes(), "text/html; charset=utf-8")


@router.get("/page/page.css", include_in_schema=False)
async def style() -> Response:
    return file_of((PAGE / "page.css").read_bytes(), "text/css; charset=utf-8")


@router.get("/page/page.js", include_in_schema=False)
async def script() -> Response:
    return file_of((PAGE / "page.js").read_bytes(), "text/javascript; charset=utf-8")


@router.get("/v1/status")
async def status(request: Request, gateway: Open) -> Response:
    """Return what runs, the latencies that this gateway saw, and the caller's accounts and jobs."""
    content = to_json(await gateway.overview.now(caller_of(request)))
    return Response(content, media_type="application/json")


@router.get("/v1/status/events")
async def status_events(request: Request, gateway: Open) -> Response:
    """Stream what runs, once a second, until the caller leaves or the gateway stops."""
    caller = caller_of(request)
    first = await gateway.overview.now(caller)

    async def events() -> AsyncIterator[bytes]:
        content = to_json(first)
        while True:
            yield b"data: %b\n\n" % content
            await asyncio.sleep(EVERY_S)
            if request.app.state.is_stopping():
                return
            try:
                content = to_json(await gateway.overview.now(caller))
            except QueueUnreachable as error:
                content = to_json({"error": error.body().message})

    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(events(), headers=headers)
