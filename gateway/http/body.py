"""Reading of a request's body: up to a limit, and parsed strictly."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from pydantic import JsonValue
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from penstock.gateway.http.context import Gateway
from penstock.gateway.openai.validation import refuse_extremes
from penstock.schemas.errors import BodyTooLarge, Cancelled, InvalidJob, UnreadableBody
from penstock.schemas.json_size import too_much
from penstock.schemas.openai import JsonObject

T = TypeVar("T")


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
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnreadableBody("the body is compressed; send it as it is")
    raw = await _read(request, gateway.settings.max_body_bytes)
    if not raw and may_be_empty:
        raw = b"{}"
    return await gateway.client.off_loop.run(len(raw), lambda: understood(parsed(raw)))


def parsed(raw: bytes) -> JsonObject:
    """Parse a JSON object, and leave out the null fields at its top.

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
    return {name: field for name, field in value.items() if field is not None}


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
