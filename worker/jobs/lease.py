"""How long a worker may write, by the monotonic clock, which is one for all its processes."""

import asyncio
import time

_LOOK_S = 0.02


class Lease:
    """Runs out unless it is renewed; a worker that was frozen finds it so before it writes."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.until_s = time.monotonic() + ttl_s

    def renew(self, began_s: float) -> None:
        """The queue was asked to renew it at `began_s`, and did."""
        self.until_s = max(self.until_s, began_s + self.ttl_s)

    @property
    def runs(self) -> bool:
        return time.monotonic() < self.until_s

    async def holds(self) -> None:
        """Wait until it runs; for ever, where it is over: the supervisor then ends the shift."""
        while not self.runs:
            await asyncio.sleep(_LOOK_S)
