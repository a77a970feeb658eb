"""What lanes noted of jobs that ended, for those who asked: webhooks, and lines of batches."""

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
from penstock.schemas.wire import Report

PAGE = 64
log = logging.getLogger(__name__)


class Note(Report):
    """What a job carries from its submission to its end: whom the end concerns."""

    webhook: str | None = Field(None, description="a URL; empty: the tenant's endpoints alone")
    batch: str | None = Field(None, description="the batch that the job is a line of")
    line: int = 0


class Ended(Report):
    """One entry of an outbox: ids and numbers, nothing that was said."""

    job: str
    tenant: str
    state: EndState
    ended_ms: int
    usage: Usage
    note: Note
    cut: Literal["", "length", "budget"] = Field("", description="what ended a choice of it early")


FIELDS = ("job", "tenant", "state", "ended_ms", "usage", "note", "cut")


async def drain(
    redis: Redis, lane: Lane, disk: Sync, hand_on: Callable[[Ended], Awaitable[None]]
) -> int:
    """Hand every entry on, once it is on the disk, and then forget it; how many it was.

    One that was handed on and not forgotten, because this process died between the two, is handed
    on again: `hand_on` must not mind.
    """
    connection, handed, count = Connection(redis), list[bytes](), 0
    mark = await disk.begin(lane.prefix)
    while reply := await connection.run("outbox", lane.prefix, PAGE, *handed):
        await disk.wait(mark)
        width = 1 + len(FIELDS)
        for at in range(0, len(reply), width):
            if ended := _ended(reply[at + 1 : at + width]):
                await hand_on(ended)
        handed = reply[::width]
        count += len(handed)
    return count


def _ended(texts: Sequence[bytes]) -> Ended | None:
    """None for a note that is no `Note`: any client of Redis may have left it."""
    values = [text.decode(errors="replace") for text in texts]
    fields: dict[str, object] = dict(zip(FIELDS, values, strict=True))
    try:
        fields |= {name: from_json(str(fields[name])) for name in ("usage", "note")}
        return Ended.model_validate(fields)
    except ValueError:
        log.warning("a note of job %r could not be read and was dropped", fields["job"])
        return None
