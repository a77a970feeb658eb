"""Routes of health: if the gateway lives, takes jobs, would start one; its version, and metrics."""

from contextlib import suppress

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from penstock.gateway.http.context import Open
from penstock.gateway.http.metrics import LaneReport
from penstock.gateway.http.overview import look
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.schemas.errors import NoWorker, QueueUnreachable

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
async def metrics(gateway: Open) -> Response:
    """Return the metrics in Prometheus' form.

    Where the queue cannot be reached, they are the gateway's own alone.
    """
    lanes, is_reached, has_housekeeping = list[LaneReport](), False, False
    with suppress(QueueUnreachable):
        lanes = await look(gateway.client)
        has_housekeeping = await HousekeepingSignature(gateway.client.redis).is_there()
        is_reached = True
    gateway.metrics.queue_reachable.set(is_reached)
    gateway.metrics.housekeeping_alive.set(has_housekeeping)
    return Response(gateway.metrics.text(lanes), media_type=CONTENT_TYPE_LATEST)


def _json(shape: dict[str, str]) -> Response:
    return Response(to_json(shape), media_type="application/json")
