"""What all routes share: settings, the queue's client, metrics, and how a request meets a job."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from gateway.batches import Batches
from gateway.client import REMEMBER_S, Client
from gateway.files import Files
from gateway.gate import MORE_HEADERS, caller_of, tenant_of
from gateway.metrics import Metrics
from gateway.outbound import Outbound
from gateway.rates import rate_headers
from gateway.settings import GatewaySettings
from gateway.share import Shares
from gateway.webhooks import Webhooks
from schemas.errors import InvalidJob, JobGone, JobNotFound
from schemas.job import Job

IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"


@dataclass(frozen=True, slots=True)
class Gateway:
    settings: GatewaySettings
    client: Client
    shares: Shares
    metrics: Metrics
    version: str
    files: Files
    batches: Batches
    webhooks: Webhooks
    outbound: Outbound

    async def name_job(self, request: Request, model: str) -> str:
        """An id for what this request asks; the same one under the same idempotency key."""
        key = request.headers.get(IDEMPOTENCY_KEY)
        return await self.client.name_job(
            model, key, tenant_of(request), caller_of(request).account
        )

    async def submit(self, request: Request, job: Job, note: str | None = None) -> None:
        """Put the job in on the caller's account; the response says what is left of its minute.

        An idempotency key is remembered for a day.
        """
        account = caller_of(request).account
        remember_s = REMEMBER_S if IDEMPOTENCY_KEY in request.headers else 0
        try:
            await self.client.submit(job, account, note, remember_s)
        finally:
            if account is not None and account.limits.has_rates:
                rates = await self.client.rates(job.job_id, account)
                request.scope[MORE_HEADERS] = rate_headers(account.limits, rates)

    def leaving(self, request: Request, job: Job) -> Callable[[], Awaitable[None]]:
        """What to do when the caller hangs up: nobody else waits for a foreground job.

        Under an idempotency key others may wait for the same one; if none does, the queue ends it.
        """

        async def leave() -> None:
            if not job.background and IDEMPOTENCY_KEY not in request.headers:
                with suppress(JobNotFound, JobGone):
                    await self.client.cancel(job.job_id, job.tenant)

        return leave


def cursor_of(last_event_id: str) -> int:
    """The tokens delivered with an event, out of its id. Raises InvalidJob."""
    if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 15:
        raise InvalidJob(
            "Last-Event-ID: must be the id of one of this job's events", "Last-Event-ID"
        )
    return int(last_event_id)


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Open = Annotated[Gateway, Depends(gateway_of)]
