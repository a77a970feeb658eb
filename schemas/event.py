"""Events, which are the lines of a job's log, and the result that outlives the log.

The cursor of a reader is the number of tokens delivered, over all choices. An event begins at the
cursor `position`. A Delta moves the cursor by its tokens. The one end event has the last position.
"""

from typing import Annotated, Literal

import msgspec
from pydantic import Field, PlainSerializer, PlainValidator

from penstock.schemas.markup.forms import Markup
from penstock.schemas.params.pooling import from_base64
from penstock.schemas.wire.wire import Report

EndState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
State = Literal["ready", "admitting", "decoding"] | EndState
FinishReason = Literal["stop", "length", "repetition", "budget"]


class TopLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A token and its log probability.

    There may be a million of them in an answer, so it is no pydantic model.
    """

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float


class TokenLogprob(TopLogprob, frozen=True, gc=False, omit_defaults=True):
    """The drawn token, and the likeliest ones at its place, likeliest first.

    offset  characters before it: of its choice's text, or of its prompt; none: it is not known
    """

    top: tuple[TopLogprob, ...] = ()
    offset: int | None = None

    def with_fewer(self, num_top: int) -> "TokenLogprob":
        """Return it with so many alternatives at most."""
        return msgspec.structs.replace(self, top=self.top[:num_top])


def fields_of_struct(value: object) -> dict[str, object]:
    """Return the fields of a struct by name, for writers of JSON that know no structs."""
    assert isinstance(value, msgspec.Struct)
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _logprobs(value: object) -> list[TokenLogprob] | None:
    return msgspec.convert(value, list[TokenLogprob] | None)


Logprobs = Annotated[
    list[TokenLogprob] | None, PlainValidator(_logprobs), PlainSerializer(msgspec.to_builtins)
]


def _markup(value: object) -> Markup | None:
    return msgspec.convert(value, Markup | None)


KeptMarkup = Annotated[Markup | None, PlainValidator(_markup), PlainSerializer(msgspec.to_builtins)]


class Usage(Report):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = Field(0, description="prompt tokens whose KV was found computed")
    reasoning_tokens: int = Field(0, description="completion tokens of thinking")


class Timing(Report):
    """The milliseconds that a job took: in all the sum of its three parts."""

    queue_ms: float = Field(description="from its submission until a worker first started it")
    prefill_ms: float = Field(description="from then until its first token")
    decode_ms: float = Field(description="from there to its last, pauses for a new worker included")
    num_attempts: int = Field(1, description="of workers to run it")


class ErrorBody(Report):
    """An error of `penstock.schemas.errors`, as it is sent."""

    code: str
    message: str
    status: int
    retryable: bool = False
    param: str | None = None
    reset_at: int | None = Field(None, description="unix seconds: when what is used up renews")


class Line(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """A line of a log. One passes through every process for each token, so no pydantic model.

    Readers skip fields that they do not know, and defaults are not written, as in a Report.
    """

    def dump(self) -> str:
        return _ENCODER.encode(self).decode()


class Delta(Line, frozen=True, gc=False, omit_defaults=True, tag="delta"):
    """The new tokens of one choice, at least one.

    text           the text that became certain with them; it may be empty
    checksum       over all tokens up to its end, `schemas.wire.checksum`; None from older workers
    finish_reason  set on the choice's last delta
    stop_reason    the stop id or string that matched
    prompt_logprobs  the prompt's, where they are asked for, on the choice's first delta;
                   the first token has nothing before it, and its log probability is 0
    markup         on the first delta of a chat's choice: how its thinking and its calls are
                   written, `schemas.markup.forms`; None where it has neither
    prompt_tokens  on a choice's first delta: how many its prompt has; None from older workers
    vector         a pooled prompt's, `schemas.params.pooling`; its one token is 0, and its text
                   the label of the likeliest class
    prompt_ids     the prompt's ids, where they are asked for, on the choice's first delta; a job of
                   `text` has nothing else, and its one token is 0
    token_strs     the same as the tokenizer's strings
    schema_error   on a choice's last delta: why its text is not what its schema says, where the
                   schema could be held only in part
    """

    position: int
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    index: int = 0
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    checksum: int | None = None
    vector: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    markup: Markup | None = None
    prompt_tokens: int | None = None
    prompt_ids: list[int] | None = None
    token_strs: list[str] | None = None
    schema_error: str | None = None

    @property
    def type(self) -> Literal["delta"]:
        return "delta"

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)

    @property
    def id(self) -> str:
        """Return how far the event's reader is, as `penstock.schemas.cursor` parses it."""
        return _id(self.end, self.checksum)


class Done(Line, frozen=True, gc=False, omit_defaults=True, tag="done"):
    position: int
    usage: Usage
    state: Literal["succeeded"] = "succeeded"
    checksum: int | None = None
    finish_reason: FinishReason | None = None  # for choices whose last delta has none
    timing: Timing | None = None  # None from older workers

    @property
    def type(self) -> Literal["done"]:
        return "done"

    @property
    def id(self) -> str:
        return _id(self.position, self.checksum)


class Failed(Line, frozen=True, gc=False, omit_defaults=True, tag="failed"):
    """The end of a job without success. Tokens delivered before it stay valid."""

    position: int
    state: Literal["failed", "cancelled", "expired", "dead"]
    error: ErrorBody
    usage: Usage = Usage()
    checksum: int | None = None

    @property
    def type(self) -> Literal["failed"]:
        return "failed"

    @property
    def id(self) -> str:
        return _id(self.position, self.checksum)


Event = Delta | Done | Failed


def _id(position: int, checksum: int | None) -> str:
    return f"{position}" if checksum is None else f"{position}-{checksum:08x}"


def of_report(kind: type, value: object) -> object:
    """Decode a part of a line that is a pydantic model: its usage or its error."""
    assert issubclass(kind, Report)
    return kind.model_validate(value)


def to_report(value: object) -> object:
    assert isinstance(value, Report)
    return value.model_dump(exclude_defaults=True)


_ENCODER = msgspec.json.Encoder(enc_hook=to_report)
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event, dec_hook=of_report)


class EVENT:
    """Reads lines of a log. Raises ValueError for a value that is no event."""

    @staticmethod
    def validate_json(text: bytes | str) -> Event:
        try:
            return _DECODER.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"not an event: {error}") from error

    @staticmethod
    def validate_python(value: object) -> Event:
        try:
            event: Event = msgspec.convert(value, Event, dec_hook=of_report)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an event: {error}") from error
        return event


class Choice(Report):
    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    vector: str | None = Field(None, description="of a pooled prompt: float32 in base64")
    prompt_logprobs: Logprobs = Field(None, description="of the prompt; the first token's is 0")
    markup: KeptMarkup = Field(None, description="how a chat's thinking and calls are written")
    prompt_tokens: int | None = Field(None, description="how many its prompt has")
    prompt_ids: list[int] | None = Field(None, description="of its prompt, where asked for")
    token_strs: list[str] | None = Field(None, description="the same as the tokenizer's strings")
    schema_error: str | None = Field(None, description="why it is not what its schema says")

    @property
    def numbers(self) -> list[float]:
        """Return the vector's numbers; none of a choice that has tokens."""
        return from_base64(self.vector or "")


class Result(Report):
    """The whole answer, kept after the log is gone."""

    job_id: str
    model: str
    state: EndState
    choices: list[Choice]
    usage: Usage
    error: ErrorBody | None = None
    timing: Timing | None = Field(None, description="of a job that succeeded")
