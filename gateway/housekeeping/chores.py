"""Housekeeping's chores as arq runs them: a few on a schedule, and the units of work that are due.

What is to be done is in the jobs' Redis. arq decides which process does it and when. A chore's id
is made of the unit and its turn, so it is in arq's queue once, however often it is handed over.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from arq import cron
from arq.connections import ArqRedis
from arq.cron import CronJob
from arq.worker import Function, func
from pydantic import JsonValue

from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.batches.batches import Batches
from penstock.gateway.batches.run import BatchRun
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.housekeeping.reconcile import Reconciler
from penstock.gateway.housekeeping.to_disk import ToDisk
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.responses.conversation import ConversationLocked, ConversationNotFound
from penstock.gateway.responses.conversations import Conversations
from penstock.gateway.tasks.due import Due
from penstock.gateway.tasks.known_models import KnownModels
from penstock.gateway.tasks.outbox import Ended, drain
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.gateway.webhooks.webhooks import Occurrence, Postman
from penstock.schemas.errors import PenstockError
from penstock.schemas.queue.queue import Queue
from penstock.schemas.redis.group_sync import Sync

EVERY_S = 5  # how often lanes are swept, besides the workers' own sweeps
RECONCILE_EVERY_MIN = 5
LONG_AGO, KEPT_S = datetime.fromtimestamp(1, UTC), 86_400
AT_ONCE = 64  # chores with work of their own; others wait for receivers
RECONCILE_S = 10.0  # for one lane; the next time goes on where this one stopped
_INCOMPLETE = {"length": "max_output_tokens", "budget": "budget"}
_OF_RESPONSES = {"succeeded": "completed", "incomplete": "incomplete", "cancelled": "cancelled"}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chores:
    """The chores of one process, and the objects that they share."""

    client: QueueClient
    postman: Postman
    batches: Batches
    conversations: Conversations
    reconciler: Reconciler
    to_disk: ToDisk
    storage: StorageAccounts
    disk: Sync  # webhooks tell only what it says is on disk
    models_kept_days: float  # 0: for ever
    run: BatchRun | None  # None means that this process has no folder of files
    busy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def on_call(self) -> list[Function]:
        return [
            func(self.deliver, name="deliver"),
            func(self.advance, name="advance"),
            func(self.move_texts, name="move_texts"),
        ]

    def on_a_clock(self) -> list[CronJob]:
        every_s = set(range(60))
        return [
            cron(self.hand_over, name="hand_over", second=every_s, run_at_startup=True),
            cron(
                self.keep_lanes,
                name="keep_lanes",
                second=set(range(0, 60, EVERY_S)),
                run_at_startup=True,
            ),
            cron(
                self.reconcile,
                name="reconcile",
                minute=set(range(0, 60, RECONCILE_EVERY_MIN)),
                second=15,
            ),
            cron(
                self.forget_models, name="forget_models", minute=45, second=45, run_at_startup=True
            ),
            cron(self.keep_files, name="keep_files", minute=0, second=30, run_at_startup=True),
        ]

    async def hand_over(self, ctx: dict[str, ArqRedis]) -> None:
        """Drain the outboxes of all lanes, and give arq the units that are due."""

        async def empty(queue: Queue) -> int:
            return await drain(self.client.redis, queue.lane, self.disk, self._hand_on)

        await self._each_lane(empty)
        await _hand_over(ctx["redis"], self.postman.due, "deliver")
        await _hand_over(ctx["redis"], self.to_disk.due, "move_texts")
        if self.run is not None:
            await _hand_over(ctx["redis"], self.batches.due, "advance")
        await HousekeepingSignature(self.client.redis).renew()

    async def keep_lanes(self, ctx: dict[str, ArqRedis]) -> None:
        """Reap and sweep every lane of every known model, and cancel the jobs of ended keys."""
        keys = await KeyStore(self.client.redis).ended()
        accounts = [key.account.name for key in keys]

        async def keep(queue: Queue) -> int:
            return await queue.reap() + await queue.sweep() + await queue.revoke(accounts)

        await self._each_lane(keep)

    async def deliver(self, ctx: dict[str, ArqRedis], unit: str, turn: int) -> None:
        """Send one tenant's due webhooks to one host."""
        await self.postman.deliver(unit, turn)

    async def advance(self, ctx: dict[str, ArqRedis], unit: str, turn: int) -> None:
        """Do one turn of one batch."""
        if self.run is not None:
            async with self.busy:
                await self.run.advance(unit, turn)

    async def move_texts(self, ctx: dict[str, ArqRedis], unit: str, turn: int) -> None:
        """Move large texts of one tenant to disk."""
        async with self.busy:
            await self.to_disk.advance(unit, turn)

    async def keep_files(self, ctx: dict[str, ArqRedis]) -> None:
        if self.run is not None:
            await self.run.files.sweep()

    async def forget_models(self, ctx: dict[str, ArqRedis]) -> None:
        """Forget the models that nobody used for so long."""
        if self.models_kept_days:
            await KnownModels(self.client).forget_unused(self.models_kept_days)

    async def reconcile(self, ctx: dict[str, ArqRedis]) -> None:
        """Mend the counts and lists of every lane where they disagree with its jobs.

        What tenants had stored and is gone is forgotten.
        """

        async def look(queue: Queue) -> int:
            return len(await self.reconciler.look(queue, RECONCILE_S))

        await self._each_lane(look)
        await self.storage.all()  # it forgets what is gone

    async def _hand_on(self, entry: Ended) -> None:
        """Tell all that wait for a job's end. It may be repeated."""
        if entry.note.webhook is not None:
            await self.postman.tell(_occurrence(entry), entry.note.webhook)
        if entry.note.batch is not None:
            await self.batches.due.poke(entry.note.batch, str(entry.note.line))
        if entry.note.conversation is not None:
            with suppress(ConversationNotFound, ConversationLocked):  # it was deleted, or is in use
                await self.conversations.read(entry.tenant, entry.note.conversation)
        if entry.note.is_large:
            await self.to_disk.due.poke(entry.tenant, entry.job)
        if entry.bytes:
            await self.storage.resize(entry.tenant, entry.job, entry.bytes)

    async def _each_lane(self, work: Callable[[Queue], Awaitable[int]]) -> None:
        """Do the work for each lane.

        A failure in one, such as a lost node of a cluster, stops no other.
        """
        for queue in await self.client.queues():
            try:
                await work(queue)
            except PenstockError as error:
                log.warning("lane %s was left for later: %s", queue.lane.label, error.message)


async def _hand_over(arq: ArqRedis, due: Due, chore: str) -> None:
    """Give arq the units that are due. An id that arq has already makes no second chore.

    arq orders chores by its hosts' clocks. So they are dated 1970, which is past on any clock.
    """
    for unit, turn in await due.units():
        name = f"{due.kind}:{unit}:{turn}"
        await arq.enqueue_job(
            chore, unit, turn, _job_id=name, _defer_until=LONG_AGO, _expires=KEPT_S
        )


def _occurrence(entry: Ended) -> Occurrence:
    """Return the event that tells of a job's end, under OpenAI's name if it is a response's."""
    usage: JsonValue = entry.usage.model_dump()
    details: dict[str, JsonValue] = {"state": entry.state, "usage": usage}
    state: str = entry.state
    if entry.state == "succeeded" and entry.cut:
        state = "incomplete"
        details["incomplete_details"] = {"reason": _INCOMPLETE[entry.cut]}
    kind, subject = f"job.{state}", entry.job
    if entry.note.is_response:
        kind, subject = f"response.{_OF_RESPONSES.get(state, 'failed')}", f"resp_{entry.job}"
    return Occurrence(entry.tenant, kind, subject, entry.ended_ms, details)
