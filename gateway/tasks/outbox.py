"""The transactional outbox of each lane: notes of ended jobs that somebody else must hear of."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from pydantic import Field
from pydantic_core import from_json

from penstock.schemas.event import EndState, Usage
from penstock.schemas.keys import Lane
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.group_sync import Sync
from penstock.schemas.redis.servers import Redis
from penstock.schemas.wire.wire import Report

PAGE = 64
log = logging.getLogger(__name__)


class Note(Report):
    """A note that a job carries from its submission on: who must be told of its end."""

    webhook: str | None = Field(None, description="a URL; empty: the tenant's endpoints alone")
    batch: str | None = Field(None, description="the batch that the job is a line of")
    line: int = 0
    conversation: str | None = Field(None, description="where what the response says belongs")
    is_large: bool = Field(False, description="what it asks is kept, and has room on disk")
    is_response: bool = Field(False, description="it is told of under the names of responses")


class Ended(Report):
    """One entry of an outbox. It has ids and numbers, and no text of the prompt or answer."""

    job: str
    tenant: str
    state: EndState
    ended_ms: int
    usage: Usage
    note: Note
    cut: Literal["", "length", "budget"] = Field("", description="what ended a choice of it early")
    bytes: int = Field(0, description="of what is kept of it, with its result")


FIELDS = ("job", "tenant", "state", "ended_ms", "usage", "note", "cut", "bytes")


async def drain(
    redis: Redis, lane: Lane, disk: Sync, hand_on: Callable[[Ended], Awaitable[None]]
) -> int:
    """Hand on every entry of a lane's outbox, and return how many there were.

    An entry is handed on once it is on the server's disk, and removed afterwards. If this process
    dies between the two, the entry is handed on again, so `hand_on` must bear a repeat.
    """
    connection, ids, count = Connection(redis), list[bytes](), 0
    mark = await disk.begin(lane.prefix)
    while reply := await connection.run("housekeeping/outbox", lane.prefix, PAGE, *ids):
        await disk.wait(mark)
        width = 1 + len(FIELDS)
        for at in range(0, len(reply), width):
            if entry := _ended(reply[at + 1 : at + width]):
                await hand_on(entry)
        ids = reply[::width]
        count += len(ids)
    return count


def _ended(texts: Sequence[bytes]) -> Ended | None:
    """Read an entry. Returns None if it cannot be read: any client of Redis may have written it."""
    values = [text.decode(errors="replace") for text in texts]
    fields: dict[str, object] = dict(zip(FIELDS, values, strict=True))
    try:
        fields |= {name: from_json(str(fields[name])) for name in ("usage", "note")}
        fields["bytes"] = fields["bytes"] or 0  # an older version wrote none
        return Ended.model_validate(fields)
    except ValueError:
        log.warning("a note of job %r could not be read and was dropped", fields["job"])
        return None
