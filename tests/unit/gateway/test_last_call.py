"""A gateway that ends answers what is on its way to it on connections that were kept open."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.server import ServerState

from penstock.gateway.server.protocol import Timeouts, bounded

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n"
LONG_S, SHORT_S = 600.0, 0.05


class Gateway:
    """A listener whose connections have our protocol. Each answer is `a` and `b`, in two pieces.

    The second one waits for `goes_on`. `end` does to the connections what uvicorn does at SIGTERM.
    """

    def __init__(self, last_call_s: float) -> None:
        self.goes_on = asyncio.Event()
        self._config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            ws="none",
            log_config=None,
            timeout_keep_alive=int(LONG_S),  # nothing but the last call's end closes a connection
        )
        self._state = ServerState()
        limits = Timeouts(LONG_S, LONG_S, LONG_S, 100, last_call_s)
        self._protocol = bounded(limits)
        self.port = 0

    async def _answer(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await self.goes_on.wait()
        await send({"type": "http.response.body", "body": b"b", "more_body": False})

    async def call(self) -> tuple[StreamReader, StreamWriter]:
        """Connect, and return once the listener has the connection."""
        had = len(self._state.connections)
        ends = await asyncio.open_connection("127.0.0.1", self.port)
        while len(self._state.connections) == had:
            await asyncio.sleep(0)
        return ends

    def end(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()

    async def run(self, test: Callable[["Gateway"], Awaitable[None]]) -> None:
        def protocol() -> asyncio.Protocol:
            return self._protocol(self._config, self._state, {})

        listening = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        async with listening, asyncio.timeout(60):
            await test(self)


def played(test: Callable[[Gateway], Awaitable[None]], last_call_s: float) -> None:
    async def main() -> None:
        await Gateway(last_call_s).run(test)

    asyncio.run(main())


async def answer(reader: StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n0\r\n\r\n")


def is_whole(said: bytes) -> bool:
    return said.startswith(b"HTTP/1.1 200") and said.endswith(b"\r\na\r\n1\r\nb\r\n0\r\n\r\n")


@pytest.mark.parametrize("used", [0, 2], ids=["new", "used"])
@pytest.mark.parametrize("begun", [b"", GET[:9], POST + b"1"], ids=["nothing", "head", "body"])
def test_a_request_that_is_on_its_way_is_the_last_of_its_connection(
    used: int, begun: bytes
) -> None:
    whole = POST + b"123" if begun.startswith(b"POST") else GET

    async def test(gateway: Gateway) -> None:
        gateway.goes_on.set()
        reader, writer = await gateway.call()
        for _ in range(used):
            writer.write(GET)
            said = await answer(reader)
            assert is_whole(said) and b"connection: close" not in said
        writer.write(begun)
        await asyncio.sleep(0.01 if begun else 0)  # whatever of it was read by then
        gateway.end()
        writer.write(whole[len(begun) :] + GET)
        said = await reader.read()
        assert is_whole(said) and b"connection: close" in said

    played(test, LONG_S)


def test_an_answer_that_began_without_a_word_of_the_end_lets_one_more_request_follow() -> None:
    """Its head told the caller to keep the connection."""

    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.call()
        writer.write(GET)
        began = await reader.readuntil(b"\r\na\r\n")
        gateway.end()
        gateway.goes_on.set()
        assert is_whole(began + await answer(reader)) and b"connection: close" not in began
        writer.write(GET)
        said = await reader.read()
        assert is_whole(said) and b"connection: close" in said

    played(test, LONG_S)


def test_what_stays_between_requests_is_closed_and_a_stream_runs_on() -> None:
    async def test(gateway: Gateway) -> None:
        streams, streaming = await gateway.call()
        streaming.write(GET)
        began = await streams.readuntil(b"\r\na\r\n")
        idle, _ = await gateway.call()
        halting, halfway = await gateway.call()
        halfway.write(GET[:9])
        gateway.end()
        assert (await idle.read(), await halting.read()) == (b"", b"")
        gateway.goes_on.set()
        assert is_whole(began + await streams.read())

    played(test, SHORT_S)


def test_an_answer_to_a_last_call_may_take_longer_than_it() -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.call()
        idle, _ = await gateway.call()
        gateway.end()
        writer.write(GET)
        began = await reader.readuntil(b"\r\na\r\n")
        assert await idle.read() == b""  # the last call is over
        gateway.goes_on.set()
        assert is_whole(began + await reader.read())

    played(test, SHORT_S)
