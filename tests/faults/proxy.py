"""A TCP relay in front of a server, and all that can go wrong on the way, each direction apart."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_LOOK_S = 0.005


@dataclass(slots=True)
class Way:
    """One direction. Set a field at any time, from any thread."""

    delay_s: float = 0.0  # of each piece, one after another
    is_held: bool = False  # nothing passes, not even the connection's end, and nobody is told
    num_cuts: int = 0  # pieces of which half is passed on before their connection is cut
    cut_after: bytes | None = None  # a piece that holds this is the last: it passes, then the cut
    num_bytes: int = 0  # passed on so far


class Proxy:
    """Relays to a port of this machine until closed. `up` is towards the server, `down` back."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self.target_port = target_port
        self.host = host
        self.port = 0
        self.up, self.down = Way(), Way()
        self.is_refusing = False  # new connections are closed at once
        self._writers: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._ends = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def num_connections(self) -> int:
        return len(self._writers)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection, as a dying host does. New ones are let through."""
        self._for_each(lambda client, server: (client.transport.abort(), server.transport.abort()))

    def silence(self) -> None:
        """The connections so far carry nothing more, and nobody is told; new ones do."""
        self._for_each(
            lambda client, server: (
                client.transport.pause_reading(),
                server.transport.pause_reading(),
            )
        )

    def half_close(self) -> None:
        """End the direction to the clients; what they still send is taken and passed on."""
        self._for_each(lambda client, server: client.write_eof())

    def part(self, is_parted: bool = True) -> None:
        """A partition: nothing passes in either direction, and nobody is told."""
        self.up.is_held = self.down.is_held = is_parted

    def heal(self) -> None:
        """As at the start. What was held goes on."""
        self.part(False)
        self.is_refusing = False
        for way in (self.up, self.down):
            way.delay_s, way.num_cuts, way.cut_after = 0.0, 0, None

    def _for_each(
        self, act: Callable[[asyncio.StreamWriter, asyncio.StreamWriter], object]
    ) -> None:
        done = threading.Event()

        def all_of_them() -> None:
            for client, server in list(self._writers):
                if not client.transport.is_closing():
                    act(client, server)
            done.set()

        try:
            self._loop.call_soon_threadsafe(all_of_them)
        except RuntimeError:  # closed: its process is just being replaced
            return
        assert done.wait(30) or not self._thread.is_alive()

    async def _run(self) -> None:
        listener = await asyncio.start_server(self._relay, self.host, 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._ends.wait()
        listener.close()
        for client, server in list(self._writers):
            client.transport.abort()
            server.transport.abort()
        pumps = asyncio.all_tasks() - {asyncio.current_task()}
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _relay(self, from_client: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            return client.transport.abort()
        try:
            from_server, server = await asyncio.open_connection(self.host, self.target_port)
        except (OSError, asyncio.CancelledError):  # cancelled at the end
            return client.transport.abort()
        pair = client, server
        self._writers.add(pair)
        try:
            with suppress(OSError, RuntimeError):  # closed, or half-closed
                await asyncio.gather(
                    self._pump(self.up, from_client, server, pair),
                    self._pump(self.down, from_server, client, pair),
                )
            await self._until_passable(self.up)
        except asyncio.CancelledError:
            pass
        finally:
            self._writers.discard(pair)
            client.transport.abort()
            server.transport.abort()

    @staticmethod
    async def _until_passable(way: Way) -> None:
        while way.is_held:
            await asyncio.sleep(_LOOK_S)

    async def _pump(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        while piece := await reader.read(1 << 16):
            if way.delay_s:
                await asyncio.sleep(way.delay_s)
            await self._until_passable(way)
            is_last = way.num_cuts > 0
            if is_last:
                way.num_cuts -= 1
                piece = piece[: len(piece) // 2]
            if way.cut_after is not None and way.cut_after in piece:
                way.cut_after, is_last = None, True
            if writer.transport.is_closing():
                return
            writer.write(piece)
            await writer.drain()
            way.num_bytes += len(piece)
            if is_last:
                await asyncio.sleep(0.02)  # what was written arrives before the reset
                break
        else:
            await self._until_passable(way)
            if writer.can_write_eof() and not writer.transport.is_closing():
                writer.write_eof()
            return
        for each in pair:
            each.transport.abort()
