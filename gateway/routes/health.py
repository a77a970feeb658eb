"""Routes of health: if the gateway lives, takes jobs, would start one; its version, and metrics."""

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request, Response

from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, caller_of
from penstock.gateway.metrics.metrics import Seen
from penstock.gateway.metrics.overview import look
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.schemas.errors import NoWorker, QueueUnreachable

LOOK_S = 1.0  # who asks for metrics waits a few seconds, also where Redis hangs

router = APIRouter(tags=["health"])


@router.get("/health")
@router.get("/health/live")
@router.get("/ping")
async def live() -> Response:
    """Answer 200 while the gateway's process serves. This says nothing of the queue."""
    return json_response({"status": "ok"})


@router.get("/health/ready")
async def ready(gateway: Open) -> Response:
    """Answer 200 where a job would start now: some worker lives and does not drain."""
    if not any(lane.staff for lane in await look(gateway.client)):
        raise NoWorker("no worker serves any model at present", retry_after_ms=1000)
    return json_response({"status": "ready"})


@router.get("/health/queue")
async def queue(gateway: Open) -> Response:
    """Answer 200 where the queue is reached, so that jobs are taken, be there a worker or none."""
    await gateway.client.models()
    return json_response({"status": "ok"})


@router.get("/version")
async def version(gateway: Open) -> Response:
    return json_response({"version": gateway.version})


@router.get("/load")
async def load(gateway: Open) -> Response:
    """Return how many jobs of all models wait or run, under vLLM's name."""
    lanes = await look(gateway.client)
    return json_response({"server_load": sum(lane.status.num_unended for lane in lanes)})


@router.get("/server_info")
async def server_info(gateway: Open) -> Response:
    """Return the version, the models' cards, and this gateway's settings that are numbers."""
    settings = gateway.settings.model_dump(mode="json")
    cards = await gateway.client.models()
    return json_response(
        {
            "version": gateway.version,
            "models": [card.model_dump(mode="json") for card in cards.values()],
            "settings": {name: value for name, value in settings.items() if _is_number(value)},
        }
    )


@router.get("/metrics")
async def metrics(request: Request, gateway: Open) -> Response:
    """Return the metrics in Prometheus' form, or in that of OpenMetrics if that is asked for.

    Where the queue cannot be reached, they are the gateway's own alone. A tenant's key sees no
    other tenant's.
    """
    caller = caller_of(request)
    snapshot = Seen(None, gateway.client.num_replayed)
    with suppress(QueueUnreachable, TimeoutError):
        async with asyncio.timeout(LOOK_S):
            snapshot = Seen(
                await look(gateway.client),
                snapshot.num_replayed,
                await gateway.webhooks.num_attempts(),
                await HousekeepingSignature(gateway.client.redis).is_there(),
            )
    tenant = None if caller.is_operator else caller.tenant
    content, content_type = gateway.metrics.text(
        snapshot, request.headers.get("accept", ""), tenant
    )
    return Response(content, headers={"content-type": content_type})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
