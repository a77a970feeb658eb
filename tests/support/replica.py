"""A primary and a replica that follows it by a relay, where it can be made to lag."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import redis

from cluster import until
from faults.proxy import Proxy
from penstock.compose.server import Server

OPTIONS = {
    "repl-diskless-sync-delay": "0",  # else a primary waits 5 s for more replicas
    "appendfsync": "always",  # else WAITAOF waits for a second, or for nothing
}


class OldServer(Server):
    """A server without WAITAOF, as all are before Redis 7.2."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--rename-command", "WAITAOF", ""]


class Pair(NamedTuple):
    primary: Server
    replica: Server
    way: Proxy

    def follow(self) -> None:
        """Let the replica follow, and return once it has caught up."""
        command(self.replica, "REPLICAOF", "127.0.0.1", self.way.port)
        until(lambda: facts(self.replica).get("master_link_status") == "up", "it to follow")

    def lag(self) -> None:
        """What the primary writes from now on does not reach the replica."""
        self.way.down.is_held = True

    def freeze(self, is_frozen: bool = True) -> None:
        assert self.replica.pid is not None
        os.kill(self.replica.pid, signal.SIGSTOP if is_frozen else signal.SIGCONT)

    def promote(self) -> None:
        """The primary dies, and the replica takes its place, on a port of its own."""
        self.primary.kill()
        command(self.replica, "REPLICAOF", "NO", "ONE")


@contextmanager
def pair(kind: type[Server] = Server, appendonly: str = "yes") -> Iterator[Pair]:
    """`appendonly` is the replica's."""
    replica = kind(options=OPTIONS | {"appendonly": appendonly})
    with kind(options=OPTIONS) as primary, replica, Proxy(primary.port) as way:
        two = Pair(primary, replica, way)
        two.follow()
        try:
            yield two
        finally:
            replica.kill()  # also one that is frozen


def command(server: Server, *words: str | int) -> object:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        return client.execute_command(*words)


def facts(server: Server) -> dict[str, object]:
    with redis.Redis(port=server.port) as client:
        found: dict[str, object] = client.info("replication")
    return found


def has_waitaof(server: Server) -> bool:
    return command(server, "COMMAND INFO", "WAITAOF") != [None]
