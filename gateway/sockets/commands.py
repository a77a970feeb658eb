"""The messages that callers send over a websocket of responses."""

import re
from dataclasses import dataclass

from penstock.gateway.openai.validation import parsed
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.errors import InvalidJob

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class InvalidStreamId(InvalidJob):
    code = "invalid_stream_id"


@dataclass(frozen=True, slots=True)
class ResponseCreate:
    """A message that asks for a response.

    fields      of the body that a POST would have
    num_bytes   of the message
    previous    the response that it goes on with, or ""
    is_stored   False: this connection alone knows the response
    stream_id   the lane; "" is the one without a name
    generates   False: the prompt is computed, and nothing is answered
    has_input   False: the prompt is what is said before any input
    """

    fields: JsonObject
    num_bytes: int
    previous: str
    is_stored: bool
    stream_id: str
    generates: bool
    has_input: bool


def read_command(raw: bytes) -> ResponseCreate:
    """Read a message. Raises BodyTooLarge, InvalidJob."""
    body = parsed(raw)
    kind = body.pop("type", None)
    if kind != "response.create":
        advice = "only response.create is served here"
        raise InvalidJob(f"type: {str(kind)[:60]!r} is not known; {advice}", "type")
    stream_id = body.pop("stream_id", "")
    if not isinstance(stream_id, str) or (stream_id and not STREAM_ID.fullmatch(stream_id)):
        sentence = "give 1 to 256 letters, digits, and of _ . -"
        raise InvalidStreamId(f"stream_id: {sentence}", "stream_id")
    if body.pop("stream", True) is not True:
        raise InvalidJob("stream: over a websocket all is streamed; leave it out", "stream")
    if body.get("background"):
        sentence = "a response that outlives its connection is asked for by POST; leave it out"
        raise InvalidJob(f"background: {sentence}", "background")
    generates = body.pop("generate", True)
    if not isinstance(generates, bool):
        raise InvalidJob("generate: give true or false", "generate")
    body["stream"] = True
    has_input = bool(body.get("input"))
    if not generates:  # a token is computed, and thrown away
        body |= {"max_output_tokens": 1, "store": False}
        body["input"] = body["input"] if has_input else ""
    previous, is_stored = f"{body.get('previous_response_id', '')}", body.get("store") is not False
    return ResponseCreate(body, len(raw), previous, is_stored, stream_id, generates, has_input)
