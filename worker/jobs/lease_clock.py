"""The time for which a worker may write, by the monotonic clock that all its processes share.

This is the worker's own copy. In Redis the lease is renewed by `worker.supervisor.renewal`, and by
each commit and each end of a job.
"""

import asyncio
import time

_LOOK_S = 0.02


class LeaseClock:
    """A lease that runs out unless it is renewed.

    It is looked at before each write, so a worker that was frozen finds that its lease is over.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.until_s = time.monotonic() + ttl_s

    def renew(self, began_s: float) -> None:
        """Extend the lease: the queue was asked at `began_s` to renew it, and did."""
        self.until_s = max(self.until_s, began_s + self.ttl_s)

    @property
    def runs(self) -> bool:
        return time.monotonic() < self.until_s

    async def holds(self) -> None:
        """Wait until the lease runs.

        Where it is over this waits for ever, and the supervisor ends the lease session.
        """
        while not self.runs:
            await asyncio.sleep(_LOOK_S)
