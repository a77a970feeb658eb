"""A request's body: read up to a limit, and parsed strictly."""

import re

from fastapi import Request
from pydantic import JsonValue
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from gateway.shape import refuse_extremes
from schemas.errors import BodyTooLarge, Cancelled, InvalidJob, UnreadableBody
from schemas.openai import JsonObject

# Commas outside of strings: each value costs microseconds, in the one thread that serves everybody.
MAX_VALUES = 2**17
STRING = re.compile(rb'"(?:[^"\\]+|\\.)*"')


async def read_object(request: Request, limit_bytes: int, may_be_empty: bool = False) -> JsonObject:
    """The body as a JSON object, without its nulls: a null field is an absent one.

    Of a name that is given twice the last value counts, for all who read it.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnreadableBody("the body is compressed; send it as it is")
    raw = await _read(request, limit_bytes)
    value = _parsed(raw) if raw or not may_be_empty else {}
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


def _parsed(raw: bytes) -> JsonValue:
    if raw.count(b",") > MAX_VALUES and STRING.sub(b"", raw).count(b",") > MAX_VALUES:
        raise BodyTooLarge(f"the body holds more than {MAX_VALUES} values")
    try:
        value: JsonValue = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJob(f"the body is not valid JSON: {error}") from None
    return value
