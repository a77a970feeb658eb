"""A real cluster of three servers, and replicas for whoever wants to see one take over."""

import contextlib
import random
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import redis

from penstock.compose.server import Server, ServerFailed
from penstock.schemas.redis.cluster import NUM_SLOTS

NODE_TIMEOUT_MS = 2000
BUS = 10_000  # above the port that clients use; servers before 7.0 know no other place
PATIENCE_S = 60.0
TRIES = 5


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if is_so():
                return
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.05)


class Cluster:
    """Primaries with a third of the slots each, and as many replicas as asked for of the first."""

    def __init__(self, num_replicas: int = 0) -> None:
        self.servers = [start_node() for _ in range(3 + num_replicas)]
        self.primaries = self.servers[:3]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}?timeout_s=2"

    def __enter__(self) -> Self:
        try:
            self._join()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self.servers:
            server.kill()
            server.stop()

    def ask(self, server: Server, *words: str | int) -> object:
        with redis.Redis(port=server.port, decode_responses=True) as client:
            return client.execute_command(*words)

    def name(self, server: Server) -> str:
        return str(self.ask(server, "CLUSTER", "MYID"))

    def owner(self, slot: int) -> Server:
        for at, primary in enumerate(self.primaries):
            first, last = _share(at)
            if first <= slot <= last:
                return primary
        raise AssertionError(slot)

    def move(self, slot: int, source: Server, target: Server) -> None:
        """Key by key, as redis-cli does it."""
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.name(source))
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.name(target))
        with redis.Redis(port=source.port) as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
                client.migrate("127.0.0.1", target.port, keys, 0, 5000)
                time.sleep(0.02)
        for server in (target, source, *self.primaries):
            self.ask(server, "CLUSTER", "SETSLOT", slot, "NODE", self.name(target))

    def _join(self) -> None:
        for number, server in enumerate(self.servers):
            self.ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for at, primary in enumerate(self.primaries):
            first, last = _share(at)
            self.ask(primary, "CLUSTER", "ADDSLOTS", *range(first, last + 1))
        for server in self.servers[1:]:
            self.ask(self.servers[0], "CLUSTER", "MEET", "127.0.0.1", server.port)
        until(lambda: all(map(self._knows_all, self.servers)), "the servers to meet")
        for replica in self.servers[3:]:
            self.ask(replica, "CLUSTER", "REPLICATE", self.name(self.primaries[0]))
        until(lambda: all(map(self._is_whole, self.servers)), "the cluster to be whole")

    def _facts(self, server: Server) -> dict[str, str]:
        with redis.Redis(port=server.port) as client:
            lines = client.execute_command("CLUSTER INFO")
        return lines if isinstance(lines, dict) else {}

    def _knows_all(self, server: Server) -> bool:
        return int(self._facts(server)["cluster_known_nodes"]) == len(self.servers)

    def _is_whole(self, server: Server) -> bool:
        with redis.Redis(port=server.port) as client:
            replication = client.info("replication")
        is_linked = replication.get("master_link_status", "up") == "up"
        return self._facts(server)["cluster_state"] == "ok" and is_linked


def _share(at: int) -> tuple[int, int]:
    """The first and last slot of a primary."""
    return at * NUM_SLOTS // 3, (at + 1) * NUM_SLOTS // 3 - 1


def start_node() -> Server:
    """One server of a cluster that has no others yet."""
    for _ in range(TRIES):
        port = _port()
        options = {"cluster-enabled": "yes", "cluster-node-timeout": str(NODE_TIMEOUT_MS)}
        with contextlib.suppress(ServerFailed):
            return Server(port=port, options=options).start()
    raise ServerFailed("no two free ports were found for a server and its bus")


def _port() -> int:
    """Free, and the bus's too; below those that systems give out by themselves."""
    while True:
        port = random.randint(12_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS))
            return port
