"""Compares the counts and lists of a lane with its jobs, and mends them where they disagree.

No transition leaves a lane so. The causes are a server that ran out of memory in the middle of one,
a restored backup, or somebody who edited keys by hand. A healthy lane is not changed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from penstock.schemas.queue.queue import Queue
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.servers import Redis

KEYS_A_STEP = 100  # bounds how long one step stalls Redis
PAUSE_S = 0.02
MISSING_MS = 60_000  # how long a job must have been in no list before it is put back
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reconciler:
    """Mends lanes in rounds. In each lane it goes on where it stopped the last time."""

    redis: Redis
    missing_ms: int = MISSING_MS
    _cursors: dict[str, bytes] = field(default_factory=dict)

    async def look(self, queue: Queue, for_s: float) -> list[tuple[str, str]]:
        """Make one round over a lane, or as much of it as `for_s` seconds allow.

        Returns what was mended, and of which job or list.
        """
        prefix, until = queue.lane.prefix, time.monotonic() + for_s
        connection, repairs = Connection(self.redis), list[tuple[str, str]]()
        while time.monotonic() < until:
            cursor = self._cursors.get(prefix, b"0")
            reply = await connection.run(
                "housekeeping/mend", prefix, cursor, KEYS_A_STEP, self.missing_ms
            )
            self._cursors[prefix] = reply[0]
            texts = [text.decode() for text in reply[1:]]
            for repair, where in zip(texts[::2], texts[1::2], strict=True):
                log.warning("lane %s: mended %s of %s", queue.lane.label, repair, where)
                repairs.append((repair, where))
            if reply[0] == b"0":
                break
            await asyncio.sleep(PAUSE_S)
        return repairs
