"""The fault proxy does what the fault tests believe of it."""

import socket
import threading
from collections.abc import Iterator

import pytest

from faults.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer:
            try:
                while piece := peer.recv(1 << 16):
                    peer.sendall(piece)
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy(echo) as proxy:
        yield proxy


@pytest.fixture
def link(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), 30) as link:
        link.sendall(b"hello")
        assert link.recv(5) == b"hello"
        yield link


def test_a_held_direction_passes_nothing_until_it_is_healed(proxy, link):
    for way in (proxy.up, proxy.down):
        way.is_held = True
        link.sendall(b"again")
        link.settimeout(0.3)
        with pytest.raises(TimeoutError):
            link.recv(5)
        proxy.heal()
        link.settimeout(30)
        assert link.recv(5) == b"again"


def test_a_cut_resets_what_is_open_and_lets_new_ones_in(proxy, link):
    proxy.cut()
    with pytest.raises(ConnectionError):
        if link.recv(1) == b"":
            raise ConnectionError
    with socket.create_connection(("127.0.0.1", proxy.port), 30) as other:
        other.sendall(b"x")
        assert other.recv(1) == b"x"


def test_a_cut_reply_arrives_by_half(proxy, link):
    proxy.down.num_cuts = 1
    link.sendall(b"12345678")
    got = b""
    with pytest.raises(ConnectionError):
        while piece := link.recv(8):
            got += piece
        raise ConnectionError
    assert got == b"1234"


def test_the_reply_to_a_named_request_is_lost(proxy, link):
    """The server has the request, its answer is never seen."""
    proxy.up.cut_after = b"XADD"
    before = proxy.up.num_bytes
    with pytest.raises(ConnectionError):
        link.sendall(b"an XADD")
        while link.recv(8):
            pass
        raise ConnectionError
    assert proxy.up.num_bytes == before + 7


def test_a_half_closed_connection_still_sends(proxy, link):
    before = proxy.up.num_bytes
    proxy.half_close()
    assert link.recv(1) == b""
    link.sendall(b"more")
    for _ in range(3000):
        if proxy.up.num_bytes == before + 4:
            break
        threading.Event().wait(0.01)
    assert proxy.up.num_bytes == before + 4
