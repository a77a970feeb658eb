"""A connection to one server, whose replies come in the order of the commands.

Many callers share a link. A cancelled caller keeps its place: its reply is read and dropped, so
that no reply ever goes to another command.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Union

import hiredis

from penstock.schemas.redis.url import Address, Login, RedisUrl

Word = str | bytes | int | float
Reply = Union[bytes, int, None, list["Reply"], "ServerRefused"]

MAX_WAITING = 4096  # commands of one link without a reply; further callers wait to send
LOOKS = 5  # checks in one time-out; a peer is dead after so many without a reply
IDLE_LOOKS = 15  # checks without any traffic, after which an idle peer is pinged
NESTED_CODE = re.compile(r"-([A-Z]+) ")  # servers before 7.0 wrap a command's error in the script's


class ServerRefused(Exception):
    """An error with which the server answered. `code` is its first word, as in OOM or MOVED."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]
        if self.code == "ERR" and (match := NESTED_CODE.search(message)):
            self.code = match[1]


class LinkLost(Exception):
    """Raised when the connection ended or was never made. The command may have been carried out."""


class Link(asyncio.Protocol):
    """A connection that callers share. It is open until `lost` is done; `open_link` makes one."""

    def __init__(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.loss: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._look_s = timeout_s / LOOKS
        self._reader = hiredis.Reader(protocolError=LinkLost, replyError=ServerRefused)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._buffer: list[bytes] = []
        self._outside: deque[asyncio.Future[None]] = deque()
        self._hear: Callable[[Reply], None] | None = None
        self._is_heard = False
        self._silent_looks = 0

    # For callers.

    async def ask(self, command: bytes) -> Reply:
        """Send one command and return its reply. Raises ServerRefused or LinkLost."""
        while len(self._waiting) >= MAX_WAITING and not self.loss.done():
            room = self._loop.create_future()
            self._outside.append(room)
            await room
        reply = await self.send(command)
        if isinstance(reply, ServerRefused):
            raise reply
        return reply

    def send(self, command: bytes) -> asyncio.Future[Reply]:
        """Send one command and return its future reply, which may be a ServerRefused.

        Commands sent in one turn of the event loop go out together. The future raises LinkLost.
        """
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if self.loss.done():
            answer.set_exception(LinkLost("the connection is closed"))
            return answer
        if not self._waiting:
            self._silent_looks = 0
        self._waiting.append(answer)
        self._write(command)
        return answer

    def listen(self, hear: Callable[[Reply], None]) -> None:
        """Make this a subscriber's link: everything that arrives from now on goes to `hear`.

        A silent peer is pinged, and the link is lost where it does not answer in time.
        """
        self._hear = hear

    def tell(self, command: bytes) -> None:
        """Send a subscriber's command; `hear` gets the answer."""
        if not self.loss.done():
            self._write(command)

    def close(self, why: str = "closed") -> None:
        """Close the link. All callers that wait get LinkLost."""
        self._lose(LinkLost(why))

    # For the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is of its own kind
        self._loop.call_later(self._look_s, self._watch)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(LinkLost(f"the server closed the connection{f': {error}' if error else ''}"))

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._take(reply)
        except LinkLost as error:
            self._lose(LinkLost(f"what the server sent is no protocol of Redis: {error}"))

    def _take(self, reply: Reply) -> None:
        if self._hear is not None:
            self._hear(reply)
            return
        if not self._waiting:
            self._lose(LinkLost(f"the server sent what nobody asked for: {reply!r:.100}"))
            return
        answer = self._waiting.popleft()
        if not answer.done():
            answer.set_result(reply)
        if self._outside and len(self._waiting) in (MAX_WAITING // 2, 0):
            self._let_in()

    def _let_in(self) -> None:
        """Let waiting callers send, as many as have a place. A cancelled caller takes none."""
        room = MAX_WAITING - len(self._waiting)
        while self._outside and room:
            waiter = self._outside.popleft()
            if not waiter.done():
                waiter.set_result(None)
                room -= 1

    def _write(self, command: bytes) -> None:
        if not self._buffer:
            self._loop.call_soon(self._flush)
        self._buffer.append(command)

    def _flush(self) -> None:
        if self._transport is not None and self._buffer and not self.loss.done():
            self._transport.write(b"".join(self._buffer))
        self._buffer.clear()

    def _watch(self) -> None:
        """Check whether the peer lives, and lose the link where it was silent for too long.

        Checks are counted, not seconds, so that after a pause of this process itself what arrived
        meanwhile still counts.
        """
        if self.loss.done():
            return
        self._loop.call_later(self._look_s, self._watch)
        if not self._waiting:
            self._let_in()  # where all who were let in were cancelled before they came
        self._silent_looks = 0 if self._is_heard else self._silent_looks + 1
        self._is_heard = False
        if self._hear is not None:
            if self._silent_looks == LOOKS // 2:
                self.tell(PING)
        elif not self._waiting:
            if self._silent_looks >= IDLE_LOOKS:
                self.send(PING).cancel()  # any reply shows that the peer lives
            return
        if self._silent_looks > LOOKS:
            self._lose(LinkLost(f"no reply in {self._look_s * LOOKS:g} s"))

    def _lose(self, why: LinkLost) -> None:
        if self.loss.done():
            return
        self.loss.set_result(None)
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(LinkLost(*why.args))
        self._waiting.clear()
        self._let_in()
        if self._transport is not None:
            self._transport.abort()


def pack(*words: Word) -> bytes:
    command: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return command


PING = pack("PING")


async def open_link(
    address: Address, place: RedisUrl, login: Login, database: int, timeout_s: float = 0
) -> Link:
    """Open a link, log in, and select the database. Raises LinkLost or ServerRefused.

    timeout_s   a peer that does not reply for so long is dead; 0 means the time-out of `place`
    """
    loop, link = asyncio.get_running_loop(), Link(timeout_s or place.timeout_s)
    try:
        async with asyncio.timeout(place.timeout_s):
            if address.port:
                await loop.create_connection(
                    lambda: link, address.host, address.port, ssl=place.tls
                )
            else:
                await loop.create_unix_connection(lambda: link, address.host)
            if login.password is not None:
                user = [login.username] if login.username else []
                await link.ask(pack("AUTH", *user, login.password))
            if database:
                await link.ask(pack("SELECT", database))
            await link.ask(PING)
    except TimeoutError:
        link.close()
        raise LinkLost(f"{address} did not answer in {place.timeout_s:g} s") from None
    except OSError as error:
        link.close()
        raise LinkLost(f"{address}: {error.strerror or error}") from error
    except BaseException:
        link.close()
        raise
    return link
