"""Websockets by uvicorn, which stay open at the gateway's end until what was asked is answered."""

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.gateway.sockets.session import ENDING

_QUIET = logging.getLogger(
    "penstock.gateway.sockets"
)  # there is no access log: it would hold tokens
_QUIET.setLevel(logging.WARNING)
_NO_HANDSHAKE = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class EndingSocket(WebSocketsSansIOProtocol):
    """One websocket. Its application hears in its scope that the gateway ends, and closes it."""

    _ending: asyncio.Event | None = None  # from the handshake on

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _QUIET

    async def run_asgi(self) -> None:
        self._ending = asyncio.Event()
        scope = cast(dict[str, object], self.scope)
        scope[ENDING] = self._ending
        try:
            await super().run_asgi()
        except asyncio.CancelledError:  # the time to drain is up
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what came, and refuse a handshake that cannot be read: its head comes at once."""
        super().data_received(data)
        if not self.handshake_initiated:
            self.transport.write(_NO_HANDSHAKE)
            self.transport.close()

    def shutdown(self) -> None:
        if self._ending is None or not self.handshake_complete:
            super().shutdown()
        else:
            self._ending.set()
