"""The parts that all routes share, and the steps that lead from a request to its job."""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request, Response

from penstock.gateway.auth.key_desk import KeyDesk
from penstock.gateway.auth.share_tokens import Shares
from penstock.gateway.batches.batches import Batches
from penstock.gateway.files.files import Files
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.files.uploads import Uploads
from penstock.gateway.http.middleware import add_headers, caller_of, span_of
from penstock.gateway.http.open_reads import OpenReads
from penstock.gateway.http.rate_headers import rate_headers
from penstock.gateway.http.settings import GatewaySettings
from penstock.gateway.metrics.metrics import Metrics
from penstock.gateway.metrics.overview import Overview
from penstock.gateway.openai.stored_chats import StoredChats
from penstock.gateway.queue_client import REMEMBER_S, QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.webhooks.outbound import Outbound
from penstock.gateway.webhooks.webhooks import Webhooks
from penstock.schemas.delivery import Outcome
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, QueueUnreachable
from penstock.schemas.job import Job

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Tracing

IDEMPOTENCY_KEY = "idempotency-key"
IS_SHARED = "penstock.is_shared"  # in a request's scope: others may have the same job
IS_READ = "penstock.is_read"  # in a request's scope: it follows a job that another submitted
LAST_EVENT_ID = "last-event-id"
SHOWN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_SHOWN = 16  # names in a header
MADE_S = 3600  # what is to be kept counts as stored for so long besides, while it is made


@dataclass(frozen=True, slots=True)
class Gateway:
    settings: GatewaySettings
    client: QueueClient
    shares: Shares
    metrics: Metrics
    version: str
    files: Files
    batches: Batches
    uploads: Uploads
    stored_chats: StoredChats
    conversations: Conversations
    keys: KeyDesk
    webhooks: Webhooks
    outbound: Outbound
    overview: Overview
    open_reads: OpenReads
    storage: StorageAccounts
    tracing: "Tracing | None" = None

    async def name(self, request: Request, model: str, affinity: str | None = None) -> str:
        """Return an id for the request's job; the same for the same idempotency key.

        Raises ModelNotFound, InvalidJob.
        """
        caller, key = caller_of(request), request.headers.get(IDEMPOTENCY_KEY)
        return await self.client.name_job(model, key, caller.tenant, caller.account, affinity)

    async def admit(
        self, request: Request, job: Job, note: str | None = None, kept_s: int | None = None
    ) -> tuple[Job, int]:
        """Submit the job on the caller's account; return it with its id, and its time in unix s.

        With `kept_s` it is kept for so long after its end, with its result. A job that has an id
        keeps it. One that is shared gets the id of the job that it joins.

        The same idempotency key gives the same id for a day. The response's headers say what is
        left of the account's limits for this minute.
        """
        account, near = caller_of(request).account, job.affinity
        is_plain = not job.background and kept_s is None and IDEMPOTENCY_KEY not in request.headers
        is_timed = job.timeout_ms is not None or job.queue_timeout_ms is not None
        is_shared = self.settings.share_equal_jobs and job.is_deterministic and is_plain
        is_shared = is_shared and not is_timed  # the time of one under way has begun
        request.scope[IS_SHARED] = is_shared
        if is_shared and near is None:  # equal jobs must meet on one lane
            _, near = await self.client.off_loop.run(
                job.tenant, job.guess_bytes(), job.dump_and_digest
            )
        try:
            job_id = job.job_id or await self.name(request, job.model, near)
        except PenstockError as error:
            self.metrics.reject("", error)
            raise
        job = job.model_copy(update={"job_id": job_id})
        remember_s = REMEMBER_S if IDEMPOTENCY_KEY in request.headers else 0
        began_ns, span = time.time_ns(), span_of(request.scope)
        if span:
            span.set_attributes({"penstock.job.id": job_id, "gen_ai.request.model": job.model})
        try:
            async with self._stored(request, job, kept_s):
                answer = await self.client.submit(job, account, note, remember_s, kept_s, is_shared)
        except PenstockError as error:
            self.metrics.reject(job.model, error)
            raise
        finally:
            if span and self.tracing:
                self.tracing.record("enqueue", span, began_ns, time.time_ns())
            if account is not None and account.limits.has_rates:
                rates = await self.client.rates(job.job_id, account)
                add_headers(request.scope, rate_headers(account.limits, rates))
        request.scope[IS_READ] = answer.outcome in (Outcome.DUPLICATE, Outcome.SHARED)
        if answer.outcome is Outcome.SHARED:
            job = job.model_copy(update={"job_id": answer.reason})
        return job, answer.created_ms // 1000

    @asynccontextmanager
    async def _stored(self, request: Request, job: Job, kept_s: int | None) -> AsyncIterator[None]:
        """Count a job that is to be kept as stored by its tenant, unless it is refused.

        Raises StorageQuotaExceeded.
        """
        if kept_s is None:
            yield
            return
        text, _ = await self.client.off_loop.run(job.tenant, job.guess_bytes(), job.dump_and_digest)
        until_s = kept_s + (MADE_S if job.timeout_ms is None else job.timeout_ms // 1000)
        given = job.tenant, job.job_id, len(text), until_s, self.most_stored(request)
        is_new = await self.storage.reserve(*given)
        try:
            yield
        except QueueUnreachable:
            raise  # it may be submitted
        except PenstockError:
            if is_new:
                await self.storage.release(job.tenant, job.job_id)
            raise

    def most_stored(self, request: Request) -> int:
        """Return how many bytes the caller's tenant may have stored."""
        key = caller_of(request).key
        own = key.limits.max_stored_bytes if key else None
        return self.settings.max_stored_bytes if own is None else own

    async def delete(self, job_id: str, tenant: str) -> None:
        """Erase a job, and take back what it had stored."""
        await self.client.delete(job_id, tenant)
        await self.storage.release(tenant, job_id)

    def tell_ignored(self, request: Request, names: Sequence[str]) -> None:
        """Count fields that are ignored, and list them in the response's headers."""
        if not names:
            return
        self.metrics.ignored.inc(len(names))
        shown = [name for name in names if SHOWN_NAME.fullmatch(name)][:MAX_SHOWN]
        if shown:
            add_headers(request.scope, {"x-penstock-ignored": ", ".join(shown)})

    def reading(self, request: Request, response: Response) -> Response:
        """Return a response that follows a job, as a read if another request submitted the job."""
        is_read = request.scope[IS_READ]
        return self.open_reads.bounded(request, response) if is_read else response

    def leaving(self, request: Request, job: Job) -> Callable[[], Awaitable[None]]:
        """Return what to call when the caller hangs up; it cancels a job that nobody else awaits.

        That is a foreground job of this request alone. Others may wait for one under an idempotency
        key, and for one that is shared; if nobody does, the queue ends it.
        """
        is_own = IDEMPOTENCY_KEY not in request.headers and not request.scope[IS_SHARED]

        async def leave() -> None:
            if is_own and not job.background:
                with suppress(JobNotFound, JobGone):
                    await self.client.cancel(job.job_id, job.tenant)

        return leave


async def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


Open = Annotated[Gateway, Depends(gateway_of)]
