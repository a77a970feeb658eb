"""The jobs API: submit a job, look at it, follow it from any point, cancel it, erase it."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field, JsonValue
from pydantic_core import to_json

from penstock.gateway.admission.forms import read_asked
from penstock.gateway.auth.access import Caller
from penstock.gateway.auth.share_tokens import ShareRequest
from penstock.gateway.http.body import HttpBody, read
from penstock.gateway.http.json_response import json_response
from penstock.gateway.http.middleware import Open, ask_of, caller_of, tenant_of
from penstock.gateway.http.sse import OpenedStream
from penstock.gateway.openai.forms import any_job
from penstock.gateway.openai.ignored import ignored_params
from penstock.gateway.openai.responses import num_bytes_of
from penstock.gateway.openai.to_job import flattened
from penstock.gateway.openai.validation import validate
from penstock.gateway.tasks.outbox import Note
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.cursor import Had
from penstock.schemas.delivery import JobStatus
from penstock.schemas.errors import JobNotFound, QueueUnreachable, UnsupportedParameter
from penstock.schemas.event import Event, Result, fields_of_struct
from penstock.schemas.job import Job
from penstock.schemas.wire.wire import Report

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


NOT_FOR_GUESTS = {"metadata", "worker", "priority_class", "position", "reason"}


@dataclass(frozen=True, slots=True)
class Lines:
    """Renders events as the log has them."""

    last_id: str

    def render(self, event: Event) -> bytes:
        return b"id: %b\n%b" % (event.id.encode(), self.render_error(event))

    def render_error(self, error: Event) -> bytes:
        fields = {name: getattr(error, name) for name in ("type", *error.__struct_fields__)}
        # ASCII, because some readers of SSE break lines at every Unicode line end.
        content = to_json(fields, exclude_none=True, ensure_ascii=True, fallback=fields_of_struct)
        return b"data: %b\n\n" % content


class OfJobs(Report):
    """The fields of a body that are no part of the job itself."""

    webhook: str | None = Field(None, description="a URL that hears of the job's end")
    keep_request: bool = Field(
        False, description="keep what was asked as long as the result, for `penstock replay`"
    )


# Fields that say how an answer is shown, each with what asks for nothing. A job is shown as it is.
OF_ANSWERS: dict[str, JsonValue] = {
    "stream": False,
    "store": False,
    "stream_options": {},
    "include_reasoning": True,
    "return_tokens_as_token_ids": False,
}
OF_JOBS = {"params", *OfJobs.model_fields}


@router.post("")
async def submit(request: Request, gateway: Open) -> Response:
    """Submit a job.

    The body is a chat's or a completion's; `params` may hold SamplingParams as they are.
    """
    ask, body = ask_of(request), HttpBody(request, gateway)
    job, own, ignored_names = await read_asked(gateway, body, partial(_asked, ask.caller))
    gateway.tell_ignored(ask, ignored_names)
    webhook, kept_s = own.webhook, gateway.client.result_ttl_s if own.keep_request else None
    if webhook is not None:
        gateway.outbound.check(webhook, "webhook")
    is_told = webhook is not None or await gateway.webhooks.has_endpoints(job.tenant)
    if is_told:  # what waits to be told counts as stored
        await gateway.storage.check(job.tenant, gateway.most_stored(ask))
    note = Note(webhook=webhook or "").dump() if is_told else None
    job_id = (await gateway.admit(ask, job, note, kept_s)).job_id
    try:
        return json_response(_shape(await gateway.client.status(job_id, job.tenant)), 202)
    except JobNotFound:  # although it was taken a moment ago
        raise QueueUnreachable("Redis lost the job that it had taken; submit it again") from None


@router.get("")
async def recent(
    request: Request,
    gateway: Open,
    limit: Annotated[int, Query(ge=1, le=100, description="jobs, at most")] = 20,
) -> Response:
    """List the jobs of the caller's tenant that something befell last, the latest first."""
    jobs = await gateway.client.recent(limit, tenant_of(request))
    return json_response({"object": "list", "data": [_shape(job) for job in jobs]})


@router.get("/{job_id}")
async def status(job_id: str, request: Request, gateway: Open) -> Response:
    tenant = tenant_of(request)
    job_status = await gateway.client.status(job_id, tenant)
    result = None
    if job_status.ended_ms is not None:
        result = await gateway.client.result(job_id, wait=False, tenant=tenant)
    shape = _shape(job_status, result)
    if caller_of(request).is_guest:
        shape = {name: field for name, field in shape.items() if name not in NOT_FOR_GUESTS}
    num_bytes = 0 if result is None else num_bytes_of(result)
    return await gateway.client.off_loop.run(tenant, num_bytes, json_response, shape)


@router.get("/{job_id}/events")
async def events(
    job_id: str,
    request: Request,
    gateway: Open,
    starting_after: Annotated[str, Query(description="an event's id, or tokens had")] = "0",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream the job's events after a cursor. An event's id is the cursor right after it."""
    tenant = tenant_of(request)
    # A browser that reconnects repeats its first query, so the last id that it saw counts instead.
    cursor = starting_after if last_event_id is None else last_event_id
    param = "starting_after" if last_event_id is None else "Last-Event-ID"
    progress = Had.parse(cursor, param)
    await gateway.client.status(job_id, tenant)  # an unknown job is 404 before the stream opens
    if progress.position:
        gateway.metrics.reconnects.inc()
    batches = gateway.client.event_batches(job_id, cursor, tenant)
    stream = gateway.reading(ask_of(request), job_id, batches)
    return OpenedStream(stream, Lines(cursor), gateway.settings.ping_s)


@router.post("/{job_id}/share")
async def share(job_id: str, request: Request, gateway: Open) -> Response:
    """Make a token with which anybody may look at and follow this job for `expires_s` seconds."""
    body = await read(request, gateway, ShareRequest, may_be_empty=True)
    tenant = tenant_of(request)
    await gateway.client.status(job_id, tenant)
    token, expires_s = await gateway.shares.issue(job_id, tenant, body.expires_s)
    url = f"{gateway.settings.root_path}/v1/jobs/{job_id}/events?share={token}"
    fields: JsonObject = {
        "object": "job.share",
        "token": token,
        "expires_at": expires_s,
        "url": url,
    }
    return json_response(fields)


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, request: Request, gateway: Open) -> Response:
    return json_response(_shape(await gateway.client.cancel(job_id, tenant_of(request))))


@router.delete("/{job_id}")
async def delete(job_id: str, request: Request, gateway: Open) -> Response:
    await gateway.delete(job_id, tenant_of(request))
    return json_response({"id": job_id, "object": "job", "deleted": True})


def _asked(caller: Caller, body: JsonObject) -> tuple[Job, OfJobs, list[str]]:
    """Return the job without its id, what the body says besides, and what is ignored.

    Raises InvalidJob.
    """
    flat = flattened(body)
    if flat.get("echo") is True:
        raise UnsupportedParameter("echo", "params.prompt_logprobs, which spell the prompt")
    job, names = any_job("", caller, flat)
    ignored_names = [name for name in names if name not in OF_JOBS]
    ignored_names += [name for name, usual in OF_ANSWERS.items() if flat.get(name, usual) != usual]
    return job, validate(OfJobs, flat), ignored_names + ignored_params(body)


def _shape(status: JobStatus, result: Result | None = None) -> dict[str, object]:
    fields: dict[str, object] = {"id": status.job_id, "object": "job"}
    fields |= status.model_dump(exclude={"job_id"})
    usage: dict[str, object] = {"completion_tokens": status.num_tokens}
    if result is not None:
        usage = result.usage.model_dump()
        fields["result"] = {name: value for name, value in result if name in Result.model_fields}
    return fields | {"usage": usage}
