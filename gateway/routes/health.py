"""Routes of health: if the gateway lives, takes jobs, would start one; its version, and metrics."""

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from penstock.gateway.http.context import Open
from penstock.gateway.http.metrics import Seen
from penstock.gateway.http.overview import look
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.schemas.errors import NoWorker, QueueUnreachable

LOOK_S = 1.0  # who asks for metrics waits a few seconds, also where Redis hangs

router = APIRouter(tags=["health"])


@router.get("/health")
@router.get("/health/live")
@router.get("/ping")
async def live() -> Response:
    """Answer 200 while the gateway's process serves. This says nothing of the queue."""
    return _json({"status": "ok"})


@router.get("/health/ready")
async def ready(gateway: Open) -> Response:
    """Answer 200 where a job would start now: some worker lives and does not drain."""
    if not any(lane.staff for lane in await look(gateway.client)):
        raise NoWorker("no worker serves any model at present", retry_after_ms=1000)
    return _json({"status": "ready"})


@router.get("/health/queue")
async def queue(gateway: Open) -> Response:
    """Answer 200 where the queue is reached, so that jobs are taken, be there a worker or none."""
    await gateway.client.models()
    return _json({"status": "ok"})


@router.get("/version")
async def version(gateway: Open) -> Response:
    return _json({"version": gateway.version})


@router.get("/metrics")
async def metrics(request: Request, gateway: Open) -> Response:
    """Return the metrics in Prometheus' form, or in that of OpenMetrics if that is asked for.

    Where the queue cannot be reached, they are the gateway's own alone.
    """
    seen = Seen(None, gateway.client.num_replayed)
    with suppress(QueueUnreachable, TimeoutError):
        async with asyncio.timeout(LOOK_S):
            seen = Seen(
                await look(gateway.client),
                seen.num_replayed,
                await gateway.webhooks.num_attempts(),
                await HousekeepingSignature(gateway.client.redis).is_there(),
            )
    content, content_type = gateway.metrics.text(seen, request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})


def _json(shape: dict[str, str]) -> Response:
    return Response(to_json(shape), media_type="application/json")
