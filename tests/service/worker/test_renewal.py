"""A worker's leases on sixty-four lanes: no lane's is late because of another's server."""

import asyncio
import os
import signal
import time
from collections import Counter

import pytest
import redis

from cluster import Cluster
from penstock.compose.server import Server
from penstock.schemas.keys import Lane
from penstock.schemas.model import WorkerCard
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.cluster import slot_of
from penstock.schemas.redis.connection import connect
from penstock.worker.process.ipc import Renewed, Signals
from penstock.worker.supervisor.renewal import Renewal

LEASE_S, EVERY_S, FROZEN_S = 10.0, 0.3, 5.0
LANES = [Lane("fake", number) for number in range(64)]


def left_s(server: Server, lanes: list[Lane]) -> float:
    """Of the lease that ends first, by the server's clock."""
    with redis.Redis(port=server.port) as client:
        seconds, micros = client.time()
        pipe = client.pipeline(transaction=False)
        for lane in lanes:
            pipe.zscore(f"{lane.prefix}workers", "w")
        return min(pipe.execute()) / 1000 - seconds - micros / 1e6


@pytest.mark.slow
def test_one_frozen_server_makes_no_other_servers_lanes_late() -> None:
    told: list[Signals | Renewed] = []

    async def main(cluster: Cluster) -> None:
        for server in cluster.servers:  # nobody takes the frozen one for dead
            cluster.ask(server, "CONFIG", "SET", "cluster-node-timeout", 60_000)
        frozen, *others = cluster.primaries
        lanes = {
            each: [lane for lane in LANES if cluster.owner(slot_of(lane.prefix.encode())) is each]
            for each in cluster.primaries
        }
        assert all(len(some) > 10 for some in lanes.values())
        async with connect(cluster.url) as link, asyncio.timeout(100):
            queues = [WorkerQueue(link, lane, int(LEASE_S * 1000)) for lane in LANES]
            for queue in queues:
                await queue.register("w", WorkerCard())
            renewal = Renewal(
                queues,
                LEASE_S,
                EVERY_S,
                lambda: True,
                lambda model: None,
                told.append,
                lambda: None,
            )
            running = asyncio.create_task(renewal.run("w"))
            await asyncio.sleep(1.0)
            assert frozen.pid is not None
            os.kill(frozen.pid, signal.SIGSTOP)
            try:
                until_s, least_s = time.monotonic() + FROZEN_S, LEASE_S
                while time.monotonic() < until_s:
                    await asyncio.sleep(EVERY_S)
                    found = [await asyncio.to_thread(left_s, one, lanes[one]) for one in others]
                    least_s = min(least_s, *found)
            finally:
                os.kill(frozen.pid, signal.SIGCONT)
            print(f"the others' leases had {least_s:.1f} s left at least, of {LEASE_S:g}")
            assert least_s > LEASE_S - FROZEN_S / 2
            while await asyncio.to_thread(left_s, frozen, lanes[frozen]) < LEASE_S / 2:
                await asyncio.sleep(EVERY_S)
            assert not running.done()
            running.cancel()

    with Cluster() as cluster:
        asyncio.run(main(cluster))
    renewed = [each.began_s for each in told if isinstance(each, Renewed)]
    assert renewed == sorted(renewed)
    ((_, times),) = Counter(renewed).most_common(1)  # its own lease is that of its slowest lane
    assert times > FROZEN_S / EVERY_S / 3
