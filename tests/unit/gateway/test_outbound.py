"""No URL of a caller's reaches what only this server can reach, or holds it up."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import httpcore
import pytest

from paths import SUPPORT
from penstock.gateway.webhooks.outbound import (
    NoAnswer,
    Outbound,
    OutboundSettings,
    Resolve,
    refuse_local,
)
from penstock.schemas.errors import InvalidJob

PEM = SUPPORT / "receiver.pem"  # for receiver.example, by itself
NAME = "receiver.example"
GLOBAL = "93.184.215.14"
OK = b"HTTP/1.1 204 No Content\r\n\r\n"
Play = Callable[[socket.socket], None]


class Receiver:
    """A listener on loopback; each connection is `play`ed. `heads` holds what was asked."""

    def __init__(self, play: Play, tls: ssl.SSLContext | None = None) -> None:
        self.heads: list[bytes] = []
        self.num_connections = 0
        self._play, self._tls = play, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, plain: socket.socket) -> None:
        try:
            with (
                plain,
                self._tls.wrap_socket(plain, server_side=True) if self._tls else plain as it,
            ):
                asked = b""
                while not asked.endswith(b"\r\n\r\n{}"):
                    if not (piece := it.recv(65536)):
                        return
                    asked += piece
                self.heads.append(asked)
                self._play(it)
        except OSError:
            return


@contextmanager
def receiver(play: Play, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    listening = Receiver(play, tls)
    try:
        yield listening
    finally:
        listening.close()


class Network(httpcore.AnyIOBackend):
    """The internet: every address of it is one receiver on loopback."""

    def __init__(self, port: int) -> None:
        self.port, self.dialled = port, list[tuple[str, int]]()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.dialled.append((host, port))
        return await super().connect_tcp("127.0.0.1", self.port)


def answering(*answers: Sequence[str]) -> Resolve:
    """A resolver that says these in turn."""
    left = iter(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return next(left)

    return resolve


def public(**others: object) -> OutboundSettings:
    return OutboundSettings.model_validate({"webhook_public": True, **others})


def private(port: int, **others: object) -> OutboundSettings:
    return OutboundSettings.model_validate(
        {"webhook_private": [f"http://127.0.0.1:{port}"], **others}
    )


def posted(outbound: Outbound, url: str) -> int:
    """A POST that ends within 30 s whatever it meets."""

    async def post() -> int:
        async with asyncio.timeout(30):
            return (await outbound.post(url, {"webhook-id": "msg_1"}, b"{}")).status

    return asyncio.run(post())


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(PEM))


def speaking_tls(names: list[str | None]) -> ssl.SSLContext:
    """A server's side, that notes the name each client asks for."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(PEM)
    tls.sni_callback = lambda connection, name, context: names.append(name)
    return tls


def say(answer: bytes) -> Play:
    return lambda connection: connection.sendall(answer)


def test_nothing_is_called_unless_it_was_allowed() -> None:
    with pytest.raises(
        InvalidJob, match=r"^webhook.url: this server calls nobody; .* by --webhook-public"
    ) as refused:
        Outbound(OutboundSettings()).check(f"https://{NAME}/", "webhook.url")
    assert refused.value.param == "webhook.url"


@pytest.mark.parametrize(
    "url",
    [
        f"http://{NAME}/", f"http://{NAME}:443/", f"ftp://{NAME}/", "file:///etc/passwd",
        f"//{NAME}/", NAME, "", "https:///x",
        f"https://user@{NAME}/", f"https://user:word@{NAME}/", f"https://{NAME}:22/",
        f"https://{NAME}:6379/", f"https://{NAME}:80/", f"https://{NAME}:0/", f"https://{NAME}:99999/",
        "https://x:" + "9" * 5000, "https://127.0.0.1/", "https://127.1/", "https://2130706433/",
        "https://0x7f000001/", "https://0x7f.1/", "https://0177.0.0.1/", "https://127.0.0.1./",
        "https://127\u30020\u30020\u30021/", "https://\u2460\u2461\u2466.0.0.1/", "https://[::1]/",
        "https://[::]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:8.8.8.8]/",
        "https://[fe80::1%25eth0]/", "https://[64:ff9b::7f00:1]/", "https://0.0.0.0/",
        "https://169.254.169.254/latest", "https://[fd00:ec2::254]/", "https://a..b/",
        "https://%6c%6f%63al/", "https://a b/", "https://a\r\nHost: b/", "https://a\\@b c/",
        "https://\u200b/", "https://" + "a" * 64 + ".example/",
        f"https://{NAME}/" + "x" * 2048, "https://\ud800.example/",
    ],
)  # fmt: skip
def test_a_url_is_refused_by_its_text(url: str) -> None:
    with pytest.raises(InvalidJob):
        Outbound(public()).check(url)


@pytest.mark.parametrize(
    "url, host, port",
    [
        (f"https://{NAME}/a?b", NAME, 443),
        (f"HTTPS://{NAME.upper()}.:8443", NAME, 8443),
        ("https://b\u00fccher.example/", "xn--bcher-kva.example", 443),
        ("https://93.184.215.14/", "93.184.215.14", 443),
        ("https://[2606:4700::1111]/", "2606:4700::1111", 443),
    ],
)
def test_a_url_is_accepted(url: str, host: str, port: int) -> None:
    target = Outbound(public()).check(url)
    assert (target.host, target.port, target.is_private) == (host, port, False)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9",
        "169.254.169.254", "172.16.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1",
        "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "224.0.1.1", "239.1.2.3",
        "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::8.8.8.8",
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:8.8.8.8", "64:ff9b::7f00:1",
        "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2001:20::1",
        "2002:7f00:1::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254",
        "fe80::1", "fe80::1%eth0", "2606:4700::1111%eth0", "fec0::1", "ff02::1", "ff0e::1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_of_the_internet_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="public internet"):
        refuse_local([address])
    with pytest.raises(ValueError, match="public internet"):
        refuse_local([GLOBAL, address])  # one among good ones spoils them all
    with receiver(say(OK)) as server:
        network = Network(server.port)
        outbound = Outbound(public(), answering([GLOBAL, address]), network)
        with pytest.raises(InvalidJob, match="public internet"):
            posted(outbound, f"https://{NAME}/")
        assert not network.dialled and not server.num_connections


def test_addresses_of_the_internet_are_let_through() -> None:
    refuse_local([GLOBAL, "8.8.8.8", "2606:4700:4700::1111", "2a00:1450::1"])
    with pytest.raises(ValueError, match="no address"):
        refuse_local([])


def test_a_local_name_is_refused_by_what_the_system_resolves() -> None:
    for host in ("localhost", "localhost.", "LOCALHOST"):
        with pytest.raises(InvalidJob, match="public internet"):
            posted(Outbound(public()), f"https://{host}/")


def test_the_checked_address_is_dialled_under_the_receivers_name() -> None:
    names: list[str | None] = []
    with receiver(say(OK), speaking_tls(names)) as server:
        network = Network(server.port)
        # It answers differently the second time: nobody must ask it twice.
        resolve = answering([GLOBAL], ["127.0.0.1"])
        outbound = Outbound(public(), resolve, network, trusting())
        assert posted(outbound, f"https://{NAME}./hook?a=b#c") == 204
    assert network.dialled == [(GLOBAL, 443)]
    assert names == [NAME]
    head = server.heads[0].lower()
    assert head.startswith(b"post /hook?a=b http/1.1\r\n")
    assert f"\r\nhost: {NAME}\r\n".encode() in head and b"webhook-id: msg_1" in head


def test_a_receiver_of_another_name_is_not_believed() -> None:
    with receiver(say(OK), speaking_tls([])) as server:
        resolve = answering([GLOBAL])
        outbound = Outbound(public(), resolve, Network(server.port), trusting())
        with pytest.raises(NoAnswer):
            posted(outbound, "https://another.example/")
    assert not server.heads


def test_an_address_that_refuses_gives_way_to_the_next() -> None:
    with receiver(say(OK), speaking_tls([])) as server:

        class FirstIsDown(Network):
            async def connect_tcp(
                self,
                host: str,
                port: int,
                timeout: float | None = None,  # noqa: ASYNC109
                local_address: str | None = None,
                socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
            ) -> httpcore.AsyncNetworkStream:
                if host == "2606:4700::1":
                    raise httpcore.ConnectError
                return await super().connect_tcp(host, port)

        resolve, network = answering(["2606:4700::1", GLOBAL]), FirstIsDown(server.port)
        outbound = Outbound(public(), resolve, network, trusting())
        assert posted(outbound, f"https://{NAME}/") == 204


def test_the_operators_own_receiver_may_be_local_and_plain() -> None:
    with receiver(say(OK)) as server:
        outbound = Outbound(private(server.port))
        assert posted(outbound, f"http://127.0.0.1:{server.port}/a") == 204
        for other in ("https://127.0.0.1", "http://localhost", "http://127.0.0.2"):
            with pytest.raises(InvalidJob, match="only https"):
                posted(outbound, f"{other}:{server.port}/a")
        with pytest.raises(InvalidJob, match="only https"):
            posted(outbound, f"https://{NAME}/")  # the public was not allowed
    assert server.num_connections == 1


def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    with receiver(say(OK)) as secret:
        location = f"http://127.0.0.1:{secret.port}/"
        redirect = f"HTTP/1.1 307 Away\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
        with receiver(say(redirect.encode())) as server:
            settings = OutboundSettings(
                webhook_private=[f"http://127.0.0.1:{each.port}" for each in (server, secret)]
            )
            assert posted(Outbound(settings), f"http://127.0.0.1:{server.port}/") == 307
    assert not secret.num_connections


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver(say(OK)) as proxy, receiver(say(OK)) as server:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert posted(Outbound(private(server.port)), f"http://127.0.0.1:{server.port}/") == 204
    assert not proxy.num_connections


def drip(first: bytes, piece: bytes) -> Play:
    """A little every 20 ms for ever: no single read is slow."""

    def play(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            time.sleep(0.02)
            connection.sendall(piece)

    return play


def test_one_request_takes_ten_seconds_at_most() -> None:
    assert OutboundSettings().webhook_timeout_s == 10.0


@pytest.mark.parametrize(
    "play",
    [
        lambda connection: time.sleep(60),
        drip(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        drip(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["silent", "long header", "many headers", "for ever 100"],
)
def test_a_receiver_that_never_answers_is_left_at_the_limit(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_WEBHOOK_TIMEOUT_S", "0.3")
    began_s = time.monotonic()
    with receiver(play) as server, pytest.raises(NoAnswer, match=r"within 0\.3 s"):
        posted(Outbound(private(server.port)), f"http://127.0.0.1:{server.port}/")
    assert time.monotonic() - began_s < 15


def test_a_name_that_is_never_resolved_is_left_at_the_limit() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return [GLOBAL]

    with pytest.raises(NoAnswer, match=r"within 0\.3 s"):
        posted(Outbound(public(webhook_timeout_s=0.3), resolve), f"https://{NAME}/")


@pytest.mark.parametrize("length", [b"Content-Length: 1073741824", b"Transfer-Encoding: chunked"])
def test_an_answers_body_is_not_taken(length: bytes) -> None:
    taken, gone = 0, threading.Event()

    def flood(connection: socket.socket) -> None:
        nonlocal taken
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        piece = b"10000\r\n" + bytes(65536) + b"\r\n"
        try:
            while taken < 1 << 30:
                connection.sendall(piece)
                taken += len(piece)
        except OSError:
            gone.set()

    with receiver(flood) as server:
        assert posted(Outbound(private(server.port)), f"http://127.0.0.1:{server.port}/") == 200
        assert gone.wait(30)
    assert taken < 32 << 20  # what two sockets' buffers take


def test_a_head_without_end_is_left_by_its_size() -> None:
    flood = b"HTTP/1.1 200 OK\r\n" + b"A: " + b"b" * (1 << 20)
    with receiver(say(flood)) as server, pytest.raises(NoAnswer, match="ProtocolError"):
        posted(Outbound(private(server.port)), f"http://127.0.0.1:{server.port}/")


def test_a_receiver_that_is_not_there_can_be_tried_again() -> None:
    with receiver(say(b"SSH-2.0-x\r\n")) as server:
        outbound, url = Outbound(private(server.port)), f"http://127.0.0.1:{server.port}/"
        with pytest.raises(NoAnswer):
            posted(outbound, url)
    with pytest.raises(NoAnswer) as absent:
        posted(outbound, url)
    assert absent.value.retryable
