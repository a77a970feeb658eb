"""Sends KV events: tells routers, by a stream in Redis, what the engine's prefix cache holds.

It goes beside the jobs and never before them. There is one call at a time, and meanwhile changes
merge: a block that came and went again is none. So what waits for a slow Redis has at most two
entries for each block of the engine, and nothing is ever dropped.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from penstock.schemas.errors import Unavailable
from penstock.schemas.queue.kv_events import BlockBatch, CachedBlock
from penstock.schemas.queue.worker_queue import BlocksTold, WorkerQueue
from penstock.worker.engine.io.messages import BlockChange, StoredBlock
from penstock.worker.jobs.lease_clock import LeaseClock
from penstock.worker.process.log import log

_MOST_CHANGES = 512  # changes in one entry: some 100 KB
_RETRY_S = 0.1


class CacheEvents:
    """The blocks that the engine remembers, by hash, and what Redis does not know of them yet.

    It lives as long as the engine, over all incarnations of the worker, and numbers the entries of
    all their streams.
    """

    def __init__(self, block_size: int, most_entries: int) -> None:
        self._block_size = block_size
        self._most_entries = most_entries
        self._blocks: dict[str, CachedBlock] = {}
        self._backlog: dict[str, CachedBlock | None] = {}  # None: it is gone
        self._is_changed = asyncio.Event()
        self._seq = 0  # number of the last entry

    def take(self, changes: Iterable[BlockChange]) -> None:
        """Take the changes of a step."""
        for change in changes:
            if isinstance(change, StoredBlock):
                parent = None if change.parent is None else change.parent.hex()
                block = CachedBlock(parent, change.token_ids)
                self._blocks[change.digest.hex()] = block
                self._note(change.digest.hex(), block)
            else:
                del self._blocks[change.hex()]
                self._note(change.hex(), None)
            self._is_changed.set()

    async def publish(self, queue: WorkerQueue, worker: str, lease: LeaseClock) -> None:
        """Tell all blocks, then each change, for as long as the incarnation has its lease."""
        begins = True
        while True:
            if begins:
                self._backlog = dict(self._blocks)
            batch = self._next(begins)
            self._seq += not batch.is_empty
            status = await self._tell(queue, worker, lease, batch)
            if status == "lost":
                return
            begins = status == "behind"
            if not begins and not self._backlog:
                self._is_changed.clear()
                with suppress(TimeoutError):  # then it is renewed with the lease
                    await asyncio.wait_for(self._is_changed.wait(), lease.ttl_s / 3)

    def _note(self, block_hash: str, block: CachedBlock | None) -> None:
        if block_hash in self._backlog:  # it is the opposite, and both together are none
            del self._backlog[block_hash]
        else:
            self._backlog[block_hash] = block

    def _next(self, begins: bool) -> BlockBatch:
        hashes = list(islice(self._backlog, _MOST_CHANGES))
        changes = {block_hash: self._backlog.pop(block_hash) for block_hash in hashes}
        return BlockBatch(
            begins,
            [block_hash for block_hash, block in changes.items() if block is None],
            {block_hash: block for block_hash, block in changes.items() if block is not None},
        )

    async def _tell(
        self, queue: WorkerQueue, worker: str, lease: LeaseClock, batch: BlockBatch
    ) -> BlocksTold:
        """Tell until Redis answers. A repeat under the same number counts once."""
        is_away = False
        while True:
            await lease.holds()
            try:
                return await queue.tell_blocks(
                    worker, self._seq, batch, self._block_size, self._most_entries
                )
            except Unavailable as error:
                if not is_away:
                    log.warning("cache could not be told of, trying again: %s", error.message)
                is_away = True
                await asyncio.sleep(_RETRY_S)
