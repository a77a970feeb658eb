"""Batches in Redis: what was asked, the progress, and the lines that are in the queue."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, JsonValue, field_validator

from penstock.gateway.batches.endpoints import ENDPOINTS
from penstock.gateway.files.files import ExpiresAfter
from penstock.gateway.files.storage_accounts import refuse_above
from penstock.gateway.tasks.due import Due, fields_of, server_time_ms
from penstock.schemas.account import Account
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import JobNotFound, PenstockError, QueueFull
from penstock.schemas.keys import CHORES
from penstock.schemas.redis.connection import Connection, texts_of
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import Report

BATCH_ID = re.compile(r"batch_[a-z2-7]{26}")
WINDOW = re.compile(r"([1-9][0-9]{0,4})([smhd])")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_WINDOW_S = 30 * 86_400
MOST_OPEN = 100  # how many batches of a tenant may run at once
MOST_LISTED = 10_000  # how many batches a tenant's list holds
KEPT_S = 30 * 86_400  # how long a batch is kept after its end
CANCEL = "cancel"  # the item that wakes a batch to be cancelled

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"
]
log = logging.getLogger(__name__)
END_STATUSES = ("completed", "failed", "expired", "cancelled")


class BatchAsked(Report):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    output_expires_after: ExpiresAfter | None = None
    webhook: str | None = Field(None, description="a URL that hears of the batch's end")

    @field_validator("endpoint")
    @classmethod
    def is_served(cls, path: str) -> str:
        if path not in ENDPOINTS:
            raise ValueError(f"give one of {', '.join(ENDPOINTS)}")
        return path

    @field_validator("completion_window")
    @classmethod
    def is_a_time(cls, text: str) -> str:
        match = WINDOW.fullmatch(text)
        if match is None or not 1 <= int(match[1]) * UNITS_S[match[2]] <= MOST_WINDOW_S:
            raise ValueError("a time such as 24h or 90m, at most 30d")
        return text

    @field_validator("metadata")
    @classmethod
    def is_small(cls, metadata: dict[str, str]) -> dict[str, str]:
        for name, value in metadata.items():
            if len(name) > 64 or len(value) > 512:
                raise ValueError("names have at most 64 characters, values at most 512")
        return metadata

    @property
    def window_s(self) -> int:
        match = WINDOW.fullmatch(self.completion_window)
        assert match is not None
        return int(match[1]) * UNITS_S[match[2]]


class BatchRecord(Report):
    """The present state of a batch.

    The first `next_line` of its lines were submitted, in the order that `order` tells.
    """

    id: str
    tenant: str
    account: Account | None = None  # the account as it was when the batch was made
    asked: BatchAsked
    status: Status
    created_ms: int
    expires_ms: int
    in_progress_ms: int | None = None
    cancelling_ms: int | None = None
    finalizing_ms: int | None = None
    ended_ms: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    abandoned: int = 0  # failed lines that were not done when the batch ended
    next_line: int = 0
    is_grouped: bool = False  # lines that begin alike follow each other
    output_bytes: int = 0  # the valid length of each part; see `parts`
    errors_bytes: int = 0
    is_sure: bool = True  # the queue has accepted every open line
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, JsonValue]] = Field(default_factory=list)

    def shape(self) -> JsonObject:
        """Return the batch as OpenAI's API shows one."""
        request, ended_s = self.asked, _seconds(self.ended_ms)
        is_cancelling = self.cancelling_ms is not None and self.status not in END_STATUSES
        errors: JsonValue = {"object": "list", "data": list[JsonValue](self.errors)}
        at: JsonObject = {
            f"{name}_at": ended_s if self.status == name else None for name in END_STATUSES
        }
        return at | {
            "id": self.id,
            "object": "batch",
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "cancelling" if is_cancelling else self.status,
            "errors": errors if self.errors else None,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": _seconds(self.created_ms),
            "in_progress_at": _seconds(self.in_progress_ms),
            "finalizing_at": _seconds(self.finalizing_ms),
            "cancelling_at": _seconds(self.cancelling_ms),
            "expires_at": _seconds(self.expires_ms),
            "metadata": dict[str, JsonValue](request.metadata) or None,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self.usage(),
        }

    def usage(self) -> JsonObject:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class BatchNotFound(JobNotFound):
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        PenstockError.__init__(self, f"batch {batch_id!r} is not known here", "batch_id")


class Batches:
    """Makes, finds and cancels batches in Redis. Housekeeping does their work: see `run`."""

    def __init__(self, redis: Redis) -> None:
        self._connection = Connection(redis)
        self.due = Due(redis, "batches")

    async def create(
        self,
        tenant: str,
        request: BatchAsked,
        account: Account | None,
        most_bytes: int,
        letters: str,
    ) -> BatchRecord:
        """Make a batch. Its lines count for the account.

        One that these letters named before is returned as it is.

        Raises QueueFull when too many of the tenant's batches have not ended, and
        StorageQuotaExceeded when it would have more than `most_bytes` stored.
        """
        batch_id = f"batch_{letters[:26]}"
        reply = await self._connection.run(
            "batches/add",
            CHORES,
            batch_id,
            tenant,
            request.dump(),
            request.window_s * 1000,
            MOST_OPEN,
            MOST_LISTED,
            KEPT_S,
            account.dump() if account else "",
            most_bytes,
        )
        refuse_above(reply, most_bytes)
        if reply[0] == b"full":
            raise QueueFull(
                f"{MOST_OPEN} batches have not ended, which is the most", retry_after_ms=60_000
            )
        return await self.get(tenant, batch_id)

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises BatchNotFound, also for another tenant's batch."""
        batch = await self.find(batch_id)
        if batch is None or batch.tenant != tenant:
            raise BatchNotFound(batch_id)
        return batch

    async def find(self, batch_id: str) -> BatchRecord | None:
        if not BATCH_ID.fullmatch(batch_id):
            return None
        _, fields = await fields_of(self._connection, f"batch:{batch_id}")
        if not fields:
            return None
        in_json = [name for name in ("asked", "errors", "account") if name in fields]
        try:
            values = {name: json.loads(fields[name]) for name in in_json}
            return BatchRecord.model_validate(fields | values)
        except ValueError:
            log.warning("the record of batch %s could not be read", batch_id)
            return None

    async def ids(self, tenant: str) -> list[str]:
        """Return the ids of the tenant's batches, the newest first."""
        ids = texts_of(await self._connection.call("ZREVRANGE", f"{CHORES}batches:{tenant}", 0, -1))
        return [text.decode() for text in ids]

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancel a batch and, soon, its open lines. One that has ended stays as it is."""
        reply = await self._connection.run("batches/cancel", CHORES, batch_id, tenant)
        if reply[0] == b"ok":
            await self.due.poke(batch_id, CANCEL)
        return await self.get(tenant, batch_id)

    # What follows is for the process that holds a batch.

    async def now_ms(self) -> int:
        return await server_time_ms(self._connection)

    async def open_lines(self, batch_id: str) -> dict[int, str]:
        """Return the lines that are in the queue, by number, as texts for `run.Open.read`."""
        _, fields = await fields_of(self._connection, f"batch_lines:{batch_id}")
        return {int(line): place for line, place in fields.items()}

    async def keep(
        self,
        batch_id: str,
        turn: int,
        fields: Mapping[str, str | int | bool | None],
        new_lines: Mapping[int, str] | None = None,
        done_items: Sequence[str] = (),
    ) -> None:
        """Write what a turn changed, all of it or nothing. Raises TurnLost.

        fields      new values of the record; None becomes the time by Redis's clock
        new_lines   lines that are now in the queue, as `open_lines` returns them
        done_items  lines, or other items, that are done
        """
        ends = fields.get("status") in END_STATUSES
        texts = {
            name: True if value is None else str(int(value) if isinstance(value, bool) else value)
            for name, value in fields.items()
        }
        reply = await self._connection.run(
            "batches/keep",
            CHORES,
            batch_id,
            turn,
            KEPT_S if ends else 0,
            json.dumps(texts),
            json.dumps({str(line): place for line, place in (new_lines or {}).items()}),
            json.dumps(list(done_items)),
        )
        if reply[0] != b"ok":
            raise TurnLost(batch_id)


class TurnLost(PenstockError):
    """Raised when another process has the batch, so that this one writes no more of it."""


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
