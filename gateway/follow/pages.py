"""The logs of jobs, read page by page: tenants in turn, and a page once for all who wait for it."""

import asyncio
from dataclasses import dataclass, field

from penstock.gateway.follow.patience import Patience
from penstock.gateway.follow.reader import Reader
from penstock.schemas.delivery import Page
from penstock.schemas.process.fair_places import FairPlaces
from penstock.schemas.process.loop_turns import LoopTurns
from penstock.schemas.queue.queue import Queue
from penstock.schemas.redis.group_sync import Mark, Sync

PAGES_AT_ONCE = 4  # pages of one kind: all other calls to Redis wait behind them

Read = tuple[Page, Mark | None]


@dataclass(slots=True, eq=False)
class _Lookup:
    """A read that has not begun, and those who wait for its page besides the one who does it."""

    readers: list[Reader]
    page: asyncio.Future[Read | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LogPages:
    """Reads pages of logs for all readers of a process.

    New readers do not wait for those who are behind: the two have places of their own. A reader who
    is behind also waits for a turn of the loop. By then all readers of the page before have the
    whole of it, so all wait for the same next page.
    """

    def __init__(self, disk: Sync, patience: Patience, turns: LoopTurns) -> None:
        self._disk = disk
        self._patience = patience
        self._turns = turns
        self._first = FairPlaces(PAGES_AT_ONCE)
        self._behind = FairPlaces(PAGES_AT_ONCE)
        self._lookups: dict[tuple[str, str, int, bool], _Lookup] = {}

    async def read(
        self, queue: Queue, tenant: str, job_id: str, at: int, channel: str, reader: Reader,
        is_behind: bool,
    ) -> Read:  # fmt: skip
        """Return the page of a log at a position, and the mark that was set before it was read.

        What is published from before the read on goes to the reader. Raises JobNotFound, JobGone,
        QueueUnreachable.
        """
        key = tenant, job_id, at, is_behind
        while (lookup := self._lookups.get(key)) is not None:
            lookup.readers.append(reader)
            if (read := await asyncio.shield(lookup.page)) is not None:
                return read
        lookup = self._lookups[key] = _Lookup([reader])
        try:
            if is_behind:
                await self._turns.turn(tenant)
            async with (self._behind if is_behind else self._first).place(tenant):
                del self._lookups[key]  # who comes from now on may miss what is published meanwhile
                for waiter in lookup.readers:
                    waiter.begin()
                with self._patience.noted():
                    mark = await self._disk.begin(queue.lane.prefix)
                    read = await queue.attach(tenant, job_id, channel, at), mark
        except BaseException as error:
            if self._lookups.get(key) is lookup:
                del self._lookups[key]
            self._fail(lookup, error)
            raise
        self._patience.succeed()
        lookup.page.set_result(read)
        return read

    def _fail(self, lookup: _Lookup, error: BaseException) -> None:
        """Hand an error on to those who wait. Where it is theirs alone who read, another reads."""
        if isinstance(error, Exception) and len(lookup.readers) > 1:
            lookup.page.set_exception(error)
            lookup.page.exception()  # nobody may wait any more, which is no failure
        else:
            lookup.page.set_result(None)
