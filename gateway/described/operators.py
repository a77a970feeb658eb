"""The shapes of what operators get, for /openapi.json."""

from typing import Literal

from pydantic import Field

from penstock.gateway.described.answers import Answered, Fields
from penstock.schemas.delivery import DeadLetter
from penstock.schemas.model import WorkerOrder


class KeyShown(Answered):
    key_id: str
    name: str
    tenant: str
    scopes: list[str]
    limits: Fields
    max_priority: str
    created_s: int
    expires_s: int | None
    revoked_s: int | None
    state: Literal["valid", "expired", "revoked"]


class KeyMade(KeyShown):
    key: str = Field(description="shown this once")


class KeyList(Answered):
    object: Literal["list"]
    data: list[KeyShown]


class QueueShown(Answered):
    model: str
    object: Literal["queue"]
    is_paused: bool
    num_queued: int
    num_running: int


class QueueList(Answered):
    object: Literal["list"]
    data: list[QueueShown]


class WorkerList(Answered):
    object: Literal["list"]
    data: list[Fields]


class WorkerTold(Answered):
    worker: str
    told: WorkerOrder


class WorkersTold(Answered):
    workers: list[str]


class DeadLetterList(Answered):
    object: Literal["list"]
    data: list[DeadLetter]
    num_dropped: int


class Requeued(Answered):
    job: str
    requeued_as: str
