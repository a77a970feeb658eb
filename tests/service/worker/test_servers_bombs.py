"""A server of others sends without end, by drops, or not at all: what is read of it is bounded."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.worker.external.server import Broken, RemoteServer, Unready
from probed import is_probed

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
MOST_BYTES = 64 << 20  # that a bomb sends, where nobody stops it
BOMBS = {
    "a line": (HEAD, b"data: " + b"x" * 65_536),
    "an error": (b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 65_536),
    "a head": (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 65_536),
    "many fields": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 10_000),
}


@contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serve each connection by `answer`, in a thread of its own; yield the URL."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    def serve_one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("head", "piece"), BOMBS.values(), ids=BOMBS)
def test_an_answer_without_end_is_broken_off(head: bytes, piece: bytes) -> None:
    sent = 0

    def bomb(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(head)
        while sent < MOST_BYTES:
            connection.sendall(piece)
            sent += len(piece)

    async def ask(url: str) -> None:
        await RemoteServer(url, None, 5).complete({}, lambda answer: False)

    with serving(bomb) as url, pytest.raises(Broken, match=r"longer than|status 500"):
        asyncio.run(asyncio.wait_for(ask(url), 60))
    assert sent < MOST_BYTES / 2


def test_a_page_that_comes_by_drops_is_waited_for_no_longer_than_another() -> None:
    def drop(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.1)

    async def ask(url: str) -> bool:
        server = RemoteServer(url, None, 1)
        with pytest.raises(Unready):
            await server.examine(None, 1)
        return await server.is_alive()

    with serving(drop) as url:
        began_s = time.monotonic()
        assert not asyncio.run(asyncio.wait_for(ask(url), 60))
        assert time.monotonic() - began_s < 5


def test_a_server_that_is_silent_is_probed() -> None:
    found: list[bool] = []

    def look(connection: socket.socket) -> None:
        found.append(is_probed(connection.getpeername()[1], connection.getsockname()[1]))

    async def ask(url: str) -> None:
        with pytest.raises(Broken):
            await RemoteServer(url, None, 5).complete({}, lambda answer: False)

    with serving(look) as url:
        asyncio.run(asyncio.wait_for(ask(url), 60))
    assert found == [True]
