"""Reading of a request's body: up to a limit, as it is or by gzip."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.gateway.admission.ask import T
from penstock.gateway.admission.gateway import Gateway
from penstock.gateway.http.middleware import ask_of
from penstock.gateway.openai.validation import Shape, parsed, validate
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import BodyTooLarge, Cancelled, InvalidJob, UnreadableBody

PIECE_BYTES = 1024  # bytes of a body that came by gzip, unpacked at once


@dataclass(frozen=True, slots=True)
class HttpBody:
    """A `Body` that is still to arrive, and can be read once."""

    request: Request
    gateway: Gateway
    may_be_empty: bool = False

    async def read(self, understood: Callable[[JsonObject], T]) -> T:
        """Read the body. Raises UnreadableBody, BodyTooLarge, InvalidJob, Cancelled."""
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            advice = "send it as it is, or by gzip"
            raise UnreadableBody(f"Content-Encoding: {encoding[:40]!r} is not read here; {advice}")
        limit_bytes = self.gateway.settings.max_body_bytes
        raw = await _received(self.request, limit_bytes)
        if not raw and self.may_be_empty:
            raw = b"{}"

        def understand() -> T:
            plain = raw if encoding == "identity" else _unpacked(raw, limit_bytes)
            return understood(parsed(plain))

        num_bytes = len(raw) if encoding == "identity" else limit_bytes
        run = self.gateway.client.off_loop.run
        return await run(ask_of(self.request).caller.tenant, num_bytes, understand)


async def read(
    request: Request, gateway: Gateway, shape: type[Shape], may_be_empty: bool = False
) -> Shape:
    """Read a body of the shape. Raises UnreadableBody, BodyTooLarge, InvalidJob, Cancelled."""
    return await HttpBody(request, gateway, may_be_empty).read(partial(validate, shape))


def _unpacked(raw: bytes, limit_bytes: int) -> bytes:
    """Return what gzip made smaller, of one member or several. Raises BodyTooLarge, InvalidJob.

    It goes by pieces, since what follows a member is copied at its end.
    """
    whole, member = bytearray(), None
    for at in range(0, len(raw), PIECE_BYTES):
        rest = raw[at : at + PIECE_BYTES]
        while rest:
            if member is None or member.eof:
                member = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip's head and checksum
            try:
                whole += member.decompress(rest, limit_bytes - len(whole) + 1)
            except zlib.error as error:
                raise InvalidJob(f"the body is not valid gzip: {error}") from None
            if len(whole) > limit_bytes:
                raise BodyTooLarge(f"the body is larger than {limit_bytes} bytes, unpacked")
            rest = member.unused_data
    if member is not None and not member.eof:
        raise InvalidJob("the body is not valid gzip: it ends too early")
    return bytes(whole)


async def _received(request: Request, limit_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    sentence = f"the body is larger than {limit_bytes} bytes"
    if length.isdecimal() and int(length) > limit_bytes:
        raise BodyTooLarge(sentence)
    body = bytearray()
    try:
        async for piece in request.stream():  # a chunked body declares no length
            body += piece
            if len(body) > limit_bytes:
                raise BodyTooLarge(sentence)
    except ClientDisconnect:
        raise Cancelled("the caller hung up before the end of the body") from None
    return bytes(body)
