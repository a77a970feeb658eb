"""The parts of a gateway, and the steps that lead from a request to its job."""

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from penstock.gateway.admission.ask import Answering, Ask, stay
from penstock.gateway.admission.door import Door
from penstock.gateway.admission.open_reads import OpenReads
from penstock.gateway.admission.rate_headers import rate_headers
from penstock.gateway.auth.key_desk import KeyDesk
from penstock.gateway.auth.share_tokens import Shares
from penstock.gateway.batches.batches import Batches
from penstock.gateway.files.files import Files
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.files.uploads import Uploads
from penstock.gateway.metrics.metrics import Metrics, RequestTimer
from penstock.gateway.metrics.overview import Overview
from penstock.gateway.openai.stored_chats import StoredChats
from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.queue_client import REMEMBER_S, EventBatches, QueueClient
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.webhooks.outbound import Outbound
from penstock.gateway.webhooks.webhooks import Webhooks
from penstock.schemas.delivery import Outcome, Submission
from penstock.schemas.errors import JobGone, JobNotFound, PenstockError, QueueUnreachable
from penstock.schemas.job import Job

SHOWN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMES = 16  # names in a header
MADE_S = 3600  # what is to be kept counts as stored for so long besides, while it is made


@dataclass(frozen=True, slots=True)
class Gateway:
    settings: GatewaySettings
    client: QueueClient
    door: Door
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

    async def admit(
        self, ask: Ask, job: Job, note: str | None = None, kept_s: int | None = None
    ) -> Answering:
        """Submit a job on the caller's account, and return how it is followed.

        With `kept_s` it is kept for so long after its end, with its result. A job that has an id
        keeps it. One that is shared gets the id of the job that it joins.

        The same idempotency key gives the same id for a day. The request's headers say what is
        left of the account's limits for this minute.
        """
        is_shared = self._may_be_shared(ask, job, kept_s)
        job = await self._with_id(ask, job, is_shared)
        submission = await self._submit(ask, job, note, kept_s, is_shared)
        if submission.outcome is Outcome.SHARED:
            job = job.model_copy(update={"job_id": submission.reason})
        return self._answering(ask, job, submission, is_shared)

    def _may_be_shared(self, ask: Ask, job: Job, kept_s: int | None) -> bool:
        """Return whether others may have the same job."""
        is_plain = not job.background and kept_s is None and ask.idempotency_key is None
        # The time of one that is under way has begun.
        is_timed = job.timeout_ms is not None or job.queue_timeout_ms is not None
        may_share = self.settings.share_equal_jobs and job.is_deterministic
        return may_share and is_plain and not is_timed

    async def _with_id(self, ask: Ask, job: Job, is_shared: bool) -> Job:
        near = job.affinity
        if is_shared and near is None:  # equal jobs must meet on one lane
            _, near = await self.client.off_loop.run(
                job.tenant, job.guess_bytes(), job.dump_and_digest
            )
        key, account = ask.idempotency_key, ask.caller.account
        try:
            job_id = job.job_id or await self.client.name_job(
                job.model, key, job.tenant, account, near
            )
        except PenstockError as error:
            self.metrics.reject("", error)
            raise
        return job.model_copy(update={"job_id": job_id})

    async def _submit(
        self, ask: Ask, job: Job, note: str | None, kept_s: int | None, is_shared: bool
    ) -> Submission:
        account = ask.caller.account
        remember_s = 0 if ask.idempotency_key is None else REMEMBER_S
        began_ns, span = time.time_ns(), ask.span
        if span:
            span.set_attributes({"penstock.job.id": job.job_id, "gen_ai.request.model": job.model})
        try:
            async with nullcontext() if kept_s is None else self._stored(ask, job, kept_s):
                return await self.client.submit(job, account, note, remember_s, kept_s, is_shared)
        except PenstockError as error:
            self.metrics.reject(job.model, error)
            raise
        finally:
            if span and self.door.tracing:
                self.door.tracing.record("enqueue", span, began_ns, time.time_ns())
            if account is not None and account.limits.has_rates:
                rates = await self.client.rates(job.job_id, account)
                ask.headers.update(rate_headers(account.limits, rates))

    @asynccontextmanager
    async def _stored(self, ask: Ask, job: Job, kept_s: int) -> AsyncIterator[None]:
        """Count a job that is to be kept as stored by its tenant, unless it is refused.

        Raises StorageQuotaExceeded.
        """
        text, _ = await self.client.off_loop.run(job.tenant, job.guess_bytes(), job.dump_and_digest)
        until_s = kept_s + (MADE_S if job.timeout_ms is None else job.timeout_ms // 1000)
        is_new = await self.storage.reserve(
            job.tenant, job.job_id, len(text), until_s, self.most_stored(ask)
        )
        try:
            yield
        except QueueUnreachable:
            raise  # it may be submitted
        except PenstockError:
            if is_new:
                await self.storage.release(job.tenant, job.job_id)
            raise

    def _answering(self, ask: Ask, job: Job, submission: Submission, is_shared: bool) -> Answering:
        """Return how the request's job is followed. Its timer sees the events of an engine pass.

        When the caller hangs up, a foreground job of this request alone is cancelled. Others may
        wait for one under an idempotency key, and for one that is shared; if nobody does, the queue
        ends it. A job that another request submitted is followed as a read.
        """
        is_own = not job.background and ask.idempotency_key is None and not is_shared

        async def cancel() -> None:
            with suppress(JobNotFound, JobGone):
                await self.client.cancel(job.job_id, job.tenant)

        events = self.client.event_batches(job.job_id, tenant=job.tenant)
        if job.text is None:
            events = RequestTimer(self.metrics, ask.span, ask.began_s).follow(job.model, events)
        is_read = submission.outcome in (Outcome.DUPLICATE, Outcome.SHARED)
        return Answering(
            job.job_id,
            events,
            ask.caller,
            cancel if is_own else stay,
            partial(self.open_reads.another, ask.caller) if is_read else nullcontext,
            submission.created_ms // 1000,
        )

    def reading(self, ask: Ask, job_id: str, events: EventBatches) -> Answering:
        """Return how a job that another request submitted is followed."""
        return Answering(
            job_id, events, ask.caller, room=partial(self.open_reads.another, ask.caller)
        )

    def most_stored(self, ask: Ask) -> int:
        """Return how many bytes the caller's tenant may have stored."""
        key = ask.caller.key
        own = key.limits.max_stored_bytes if key else None
        return self.settings.max_stored_bytes if own is None else own

    async def delete(self, job_id: str, tenant: str) -> None:
        """Erase a job, and take back what it had stored."""
        await self.client.delete(job_id, tenant)
        await self.storage.release(tenant, job_id)

    def tell_ignored(self, ask: Ask, names: Sequence[str]) -> None:
        """Count fields that are ignored, and list them in the answer's headers."""
        if not names:
            return
        self.metrics.ignored_fields.inc(len(names))
        header_names = [name for name in names if SHOWN_NAME.fullmatch(name)][:MAX_NAMES]
        if header_names:
            ask.headers["x-penstock-ignored"] = ", ".join(header_names)
