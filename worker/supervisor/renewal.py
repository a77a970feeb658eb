"""The heartbeat that renews one incarnation's lease on its lanes, each lane by itself.

No lane waits for another lane's server: a server that answers late delays its own lanes alone.
Commits and ends of jobs renew it too; this is for the time between them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

from pydantic import JsonValue

from penstock.schemas.errors import Unavailable
from penstock.schemas.model import WorkerOrder
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.worker.process.ipc import Renewed, Signals


class Renewal:
    """The renewal of a lease, until it was lost on any lane or could not be renewed in its time.

    is_alive   returns whether the worker's processes move; while they do not, nothing is renewed
    stats      returns the numbers that are sent with each renewal of a lane of this model
    obey       takes each order that an operator gave the worker; one may come once for each lane
    tell       takes JobSignals of jobs in work, and when the lease of the slowest lane was renewed
    """

    def __init__(
        self,
        queues: Sequence[WorkerQueue],
        lease_s: float,
        every_s: float,
        is_alive: Callable[[], bool],
        stats: Callable[[str], dict[str, JsonValue] | None],
        tell: Callable[[Signals | Renewed], None],
        obey: Callable[[WorkerOrder], None],
    ) -> None:
        self._queues = queues
        self._lease_s = lease_s
        self._every_s = every_s
        self._is_alive = is_alive
        self._stats = stats
        self._tell = tell
        self._obey = obey
        self._orders = [set[str]() for _ in queues]  # orders that were obeyed
        self._renewed_s = [time.monotonic()] * len(queues)  # when the renewing calls began
        self._is_wanted = False

    async def run(self, incarnation: str) -> None:
        lanes = [
            asyncio.create_task(self._keep(at, incarnation)) for at in range(len(self._queues))
        ]
        try:
            while (left_s := min(self._renewed_s) + self._lease_s - time.monotonic()) > 0:
                self._tell(Renewed(min(self._renewed_s)))
                self._is_wanted = self._is_alive()
                wait_s = min(self._every_s, left_s)
                done, _ = await asyncio.wait(
                    lanes, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    done.pop().result()
                    return
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _keep(self, at: int, incarnation: str) -> None:
        """Renew one lane's lease; return when it was lost."""
        while True:
            await asyncio.sleep(self._every_s)
            began_s = time.monotonic()
            if began_s >= self._renewed_s[at] + self._lease_s:  # this process was frozen
                return
            if not self._is_wanted:
                continue
            try:
                queue = self._queues[at]
                signals = await queue.beat(incarnation, self._stats(queue.lane.model))
            except Unavailable:
                continue
            if signals is None:
                return
            self._renewed_s[at] = began_s
            for order in self._queues[at].orders:
                if order not in self._orders[at]:
                    self._orders[at].add(order)
                    self._obey(cast(WorkerOrder, order.partition(" ")[2]))
            if signals:
                self._tell(Signals(signals))
