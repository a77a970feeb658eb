"""A POST that is made within a websocket: it passes all that a request of its own would pass."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger(__name__)
# Of the handshake alone, or of one request: each message of the socket is another.
_NOT_PASSED_ON = (
    b"connection",
    b"upgrade",
    b"sec-websocket-",
    b"content-",
    b"transfer-encoding",
    b"accept-encoding",
    b"idempotency-key",
    b"last-event-id",
    b"x-request-id",
)

Sender = Callable[[str, bytes], Awaitable[None]]  # an event's type, and its JSON


async def post(
    app: ASGIApp,
    handshake: Scope,
    body: bytes,
    more: Mapping[str, Any],
    left: asyncio.Event,
    send_event: Sender,
) -> tuple[int, bytes]:
    """Post a body to the path of the websocket; return the status, and what is no event stream.

    handshake   the scope of the websocket, whose headers say who asks
    more        is put into the scope of the request
    left        is set when the caller has hung up
    send_event  gets each event of the answer, if that is a stream of them
    """
    scope: Scope = {
        **handshake,
        **more,
        "type": "http",
        "method": "POST",
        "scheme": "https" if handshake["scheme"] == "wss" else "http",
        "headers": [
            *(each for each in handshake["headers"] if not each[0].startswith(_NOT_PASSED_ON)),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
    }
    status, is_stream, is_read = 0, False, False
    received = bytearray()

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, is_stream
        if message["type"] == "http.response.start":
            status = message["status"]
            is_stream = dict(message["headers"])[b"content-type"].startswith(b"text/event-stream")
        elif is_stream:
            for kind, data in _events(message["body"]):
                await send_event(kind, data)
        else:
            received.extend(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # after it was answered with 500, or in the middle of a stream
        log.exception("a request over a websocket failed")
    return status, bytes(received)


def _events(chunk: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the events of server-sent events that are whole. Comments are left out."""
    kind = ""
    for line in chunk.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            yield kind, value
