"""The jobs API: put a job in, look at it, follow it from any point, cancel it, erase it."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field
from pydantic_core import to_json

from gateway.body import read_object
from gateway.gate import caller_of, tenant_of
from gateway.gateway import Open, cursor_of
from gateway.intake import any_job, flattened
from gateway.outbox import Note
from gateway.shape import checked
from gateway.share import MAX_S
from gateway.sse import OpenedStream
from schemas.delivery import JobStatus
from schemas.event import Delta, Event, Result
from schemas.openai import Asked, JsonObject
from schemas.wire import Report, Wire

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


NOT_FOR_GUESTS = {"metadata", "worker", "priority_class", "position", "reason"}


class ShareRequest(Wire):
    expires_s: int = Field(3600, ge=1, le=MAX_S, description="from now")


class Told(Report):
    """Who hears of the job's end."""

    webhook: str | None = None


@router.post("")
async def submit(request: Request, gateway: Open) -> Response:
    """The body is a chat's or a completion's; `params` may hold SamplingParams as they are."""
    body = flattened(await read_object(request, gateway.settings.max_body_bytes))
    webhook = checked(Told, body).webhook
    if webhook is not None:
        gateway.outbound.check(webhook, "webhook")
    job_id = await gateway.name_job(request, checked(Asked, body).model)
    job = any_job(job_id, caller_of(request), body)
    is_told = webhook is not None or await gateway.webhooks.has_endpoints(job.tenant)
    note = Note(webhook=webhook or "").dump() if is_told else None
    await gateway.submit(request, job, note)
    return _json(_shape(await gateway.client.status(job_id, job.tenant)), 202)


@router.get("/{job_id}")
async def status(job_id: str, request: Request, gateway: Open) -> Response:
    tenant = tenant_of(request)
    shown = await gateway.client.status(job_id, tenant)
    result = None
    if shown.ended_ms is not None:
        result = await gateway.client.result(job_id, wait=False, tenant=tenant)
    shape = _shape(shown, result)
    if caller_of(request).is_guest:
        shape = {name: field for name, field in shape.items() if name not in NOT_FOR_GUESTS}
    return _json(shape)


@router.get("/{job_id}/events")
async def events(
    job_id: str,
    request: Request,
    gateway: Open,
    starting_after: Annotated[int, Query(ge=0, lt=10**15)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Server-sent events after a cursor. An event's id is the cursor behind it."""
    tenant = tenant_of(request)
    # A browser that reconnects repeats the query it began with: what it saw since counts.
    cursor = starting_after if last_event_id is None else cursor_of(last_event_id)
    await gateway.client.status(job_id, tenant)  # an unknown job is 404 before the stream opens
    following = gateway.client.batches(job_id, cursor, tenant)
    return OpenedStream(following, _nothing, _render, gateway.settings.ping_s)


@router.post("/{job_id}/share")
async def share(job_id: str, request: Request, gateway: Open) -> Response:
    """A token with which anybody may look at this job and follow it, for `expires_s` seconds."""
    body = await read_object(request, gateway.settings.max_body_bytes, may_be_empty=True)
    asked = checked(ShareRequest, body)
    tenant = tenant_of(request)
    await gateway.client.status(job_id, tenant)
    token, expires_s = await gateway.shares.issue(job_id, tenant, asked.expires_s)
    url = f"/v1/jobs/{job_id}/events?share={token}"
    shown: JsonObject = {"object": "job.share", "token": token, "expires_at": expires_s, "url": url}
    return _json(shown)


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, request: Request, gateway: Open) -> Response:
    return _json(_shape(await gateway.client.cancel(job_id, tenant_of(request))))


@router.delete("/{job_id}")
async def delete(job_id: str, request: Request, gateway: Open) -> Response:
    await gateway.client.delete(job_id, tenant_of(request))
    return _json({"id": job_id, "object": "job", "deleted": True})


def _render(event: Event) -> bytes:
    cursor = event.end if isinstance(event, Delta) else event.position
    fields = {name: getattr(event, name) for name in ("type", *event.__struct_fields__)}
    # ASCII, because some readers of SSE break lines at every Unicode line end.
    shown = to_json(fields, exclude_none=True, ensure_ascii=True)
    return b"id: %d\ndata: %b\n\n" % (cursor, shown)


async def _nothing() -> None:
    """A follower who leaves ends nothing: the job is another's, or its reader comes back."""


def _shape(status: JobStatus, result: Result | None = None) -> JsonObject:
    shown: JsonObject = {"id": status.job_id, "object": "job"}
    shown |= status.model_dump(exclude={"job_id"})
    usage: JsonObject = {"completion_tokens": status.num_tokens}
    if result is not None:
        usage = result.usage.model_dump()
        shown["result"] = result.model_dump()
    return shown | {"usage": usage}


def _json(shape: JsonObject, status: int = 200) -> Response:
    return Response(to_json(shape), status, media_type="application/json")
