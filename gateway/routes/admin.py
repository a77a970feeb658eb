"""The routes of operators: keys, queues, workers and dead letters, as the commands have them."""

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.auth.key_desk import KeyChange, KeyRequest
from penstock.gateway.http.body import read
from penstock.gateway.http.idempotency import name_of
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, caller_of
from penstock.gateway.metrics.overview import look, workers
from penstock.gateway.tasks.dead_letters import DeadLetters
from penstock.gateway.tasks.fleet import Fleet
from penstock.schemas.model import WorkerOrder

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/admin", tags=["admin"])
vllm_router = APIRouter(tags=["admin"])  # at vLLM's own paths


@router.post("/keys")
async def create_key(request: Request, gateway: Open) -> Response:
    """Make an API key. Its text, `key`, is shown this once."""
    body = await read(request, gateway, KeyRequest, may_be_empty=True)
    text, key = await gateway.keys.make(body, await name_of(request, gateway, body))
    log.info("key %s was made by %s", key.key_id, _who(request))
    return json_response({"key": text, **key.shown()})


@router.get("/keys")
async def list_keys(gateway: Open) -> Response:
    """List all keys ever made, without what is secret of them."""
    keys = [key.shown() for key in await gateway.keys.all()]
    return json_response({"object": "list", "data": keys})


@router.post("/keys/{key_id}")
async def change_key(key_id: str, request: Request, gateway: Open) -> Response:
    """Give a key other limits, or another name. What is left out stays."""
    body = await read(request, gateway, KeyChange)
    key = await gateway.keys.change(key_id, body)
    log.info("key %s was changed by %s", key_id, _who(request))
    return json_response(key.shown())


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, request: Request, gateway: Open) -> Response:
    """Revoke a key. Gateways learn of it within seconds."""
    key = await gateway.keys.revoke(key_id)
    log.info("key %s was revoked by %s", key_id, _who(request))
    return json_response(key.shown())


@router.get("/dead_letters")
async def list_dead(
    gateway: Open,
    limit: Annotated[int, Query(ge=1, le=1000, description="of each lane")] = 100,
) -> Response:
    """List jobs that were given up, the newest first: what is known of them but their texts."""
    letters, num_dropped = await DeadLetters(gateway.client).newest(limit)
    records = [letter.model_dump(mode="json", by_alias=True) for letter in letters]
    return json_response({"object": "list", "data": records, "num_dropped": num_dropped})


@router.get("/dead_letters/{job_id}")
async def show_dead(job_id: str, gateway: Open) -> Response:
    letter, job = await DeadLetters(gateway.client).get(job_id)
    fields = letter.model_dump(mode="json", by_alias=True)
    return json_response({**fields, "can_be_requeued": job is not None})


@router.post("/dead_letters/{job_id}/requeue")
async def requeue_dead(job_id: str, request: Request, gateway: Open) -> Response:
    """Submit a job again, in the background, under an id that follows from its own."""
    again = await DeadLetters(gateway.client).requeue(job_id)
    log.info("job %s was submitted again by %s", job_id, _who(request))
    return json_response({"job": job_id, "requeued_as": again})


@router.delete("/dead_letters/{job_id}")
async def drop_dead(job_id: str, request: Request, gateway: Open) -> Response:
    await DeadLetters(gateway.client).drop(job_id)
    log.info("dead letter %s was dropped by %s", job_id, _who(request))
    return json_response({"id": job_id, "object": "dead_letter", "deleted": True})


@router.get("/queues")
async def list_queues(gateway: Open) -> Response:
    return json_response({"object": "list", "data": [*await Fleet(gateway.client).queues()]})


@router.post("/queues/{model:path}/pause")
async def pause_queue(model: str, request: Request, gateway: Open) -> Response:
    """Let no job of a model begin. Jobs are accepted, and wait; what runs, runs to its end."""
    queue = await Fleet(gateway.client).set_paused(model, True)
    log.info("the queue of %s was paused by %s", model, _who(request))
    return json_response(queue)


@router.post("/queues/{model:path}/resume")
async def resume_queue(model: str, request: Request, gateway: Open) -> Response:
    """Let the jobs of a model begin again."""
    queue = await Fleet(gateway.client).set_paused(model, False)
    log.info("the queue of %s was resumed by %s", model, _who(request))
    return json_response(queue)


@router.get("/workers")
async def list_workers(gateway: Open) -> Response:
    return json_response({"object": "list", "data": [*workers(await look(gateway.client))]})


@router.post("/workers/{worker}/drain")
async def drain_worker(worker: str, request: Request, gateway: Open) -> Response:
    """Let a worker end in order: it takes nothing new, and hands on what it does not finish."""
    return await _told(worker, "drain", request, gateway)


@router.post("/workers/{worker}/sleep")
async def sleep_worker(worker: str, request: Request, gateway: Open) -> Response:
    """Let a worker give its model's memory back, and take nothing until it is told to wake."""
    return await _told(worker, "sleep", request, gateway)


@router.post("/workers/{worker}/wake")
async def wake_worker(worker: str, request: Request, gateway: Open) -> Response:
    """Let a worker that sleeps load its model again, and take jobs."""
    return await _told(worker, "wake", request, gateway)


@vllm_router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, gateway: Open) -> Response:
    """Let all workers forget what they have computed, which each does within seconds."""
    names = await Fleet(gateway.client).reset_prefix_caches()
    log.info("%d prefix caches were reset by %s", len(names), _who(request))
    return json_response({"workers": names})


async def _told(worker: str, order: WorkerOrder, request: Request, gateway: Gateway) -> Response:
    await Fleet(gateway.client).tell(worker, order)
    log.info("worker %s was told to %s by %s", worker, order, _who(request))
    return json_response({"worker": worker, "told": order})


def _who(request: Request) -> str:
    key = caller_of(request).key
    return f"key {key.key_id}" if key else "a listed key"
