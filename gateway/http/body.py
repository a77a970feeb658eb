"""Reading of a request's body: up to a limit, and parsed strictly."""

import zlib
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from pydantic import JsonValue
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from penstock.gateway.http.context import Gateway
from penstock.gateway.http.middleware import tenant_of
from penstock.gateway.openai.validation import refuse_extremes
from penstock.schemas.api.json_size import too_much
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import BodyTooLarge, Cancelled, InvalidJob, UnreadableBody

T = TypeVar("T")
PIECE_BYTES = 1024  # bytes of a body that came by gzip, unpacked at once


async def read(
    request: Request,
    gateway: Gateway,
    understood: Callable[[JsonObject], T],
    may_be_empty: bool = False,
) -> T:
    """Read the body, a JSON object, and return what `understood` makes of it.

    A null field at its top counts as absent. Where a name is given twice the last value counts, for
    everything that reads the body. Raises UnreadableBody, BodyTooLarge, InvalidJob, Cancelled.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        known = "send it as it is, or by gzip"
        raise UnreadableBody(f"Content-Encoding: {encoding[:40]!r} is not read here; {known}")
    tenant, limit_bytes = tenant_of(request), gateway.settings.max_body_bytes
    raw = await _read(request, limit_bytes)
    if not raw and may_be_empty:
        raw = b"{}"
    if encoding == "identity":
        return await gateway.client.off_loop.run(tenant, len(raw), lambda: understood(parsed(raw)))

    def unpacked() -> T:
        return understood(parsed(_unpacked(raw, limit_bytes)))

    return await gateway.client.off_loop.run(tenant, limit_bytes, unpacked)


def parsed(raw: bytes) -> JsonObject:
    """Parse a JSON object, and leave out the null fields at its top.

    A field at the top that is a whole number counts as an integer: some languages write 16 as 16.0.
    Raises BodyTooLarge, InvalidJob.
    """
    if excess := too_much(raw):
        raise BodyTooLarge(f"the body holds {excess}")
    try:
        value: JsonValue = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJob(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJob("the body must be a JSON object")
    refuse_extremes(value)
    return {name: _whole(field) for name, field in value.items() if field is not None}


def _whole(field: JsonValue) -> JsonValue:
    is_whole = isinstance(field, float) and field.is_integer() and abs(field) < 2**53
    return int(field) if is_whole else field  # type: ignore[arg-type]


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


async def _read(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    too_large = BodyTooLarge(f"the body is larger than {limit_bytes} bytes")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large
    received = bytearray()
    try:
        async for piece in request.stream():  # a chunked body declares no length
            received += piece
            if len(received) > limit_bytes:
                raise too_large
    except ClientDisconnect:
        raise Cancelled("the caller hung up before the end of the body") from None
    return bytes(received)
