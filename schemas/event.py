"""What flows back: the lines of a job's log, and the result that outlives it.

The cursor of a reader is the number of tokens delivered, over all choices. An event begins at the
cursor `position`; a Delta moves it by its tokens; the one end event stands at the last position.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from schemas.wire import Report

EndState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
State = Literal["ready", "admitting", "decoding"] | EndState
FinishReason = Literal["stop", "length"]


class TopLogprob(Report):
    token_id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """The drawn token, and the likeliest ones at its place, likeliest first."""

    top: list[TopLogprob] = Field(default_factory=list)


class Usage(Report):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = Field(0, description="prompt tokens whose KV was found computed")


class ErrorBody(Report):
    """An error of `schemas.errors`, as it travels."""

    code: str
    message: str
    status: int
    retryable: bool = False
    param: str | None = None


class Delta(Report):
    """At least one new token of one choice. `text` is what became certain: it may be empty."""

    type: Literal["delta"] = "delta"
    position: int
    index: int = 0
    token_ids: list[int] = Field(min_length=1)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = Field(None, description="set on the choice's last delta")
    stop_reason: int | str | None = Field(None, description="the stop id or string that matched")

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)


class Done(Report):
    type: Literal["done"] = "done"
    position: int
    usage: Usage
    state: Literal["succeeded"] = "succeeded"


class Failed(Report):
    """Ended without success; tokens delivered before stay true."""

    type: Literal["failed"] = "failed"
    position: int
    state: Literal["failed", "cancelled", "expired", "dead"]
    error: ErrorBody
    usage: Usage = Usage()


Event = Annotated[Delta | Done | Failed, Field(discriminator="type")]
EVENT: TypeAdapter[Delta | Done | Failed] = TypeAdapter(Event)


def dump_event(event: Delta | Done | Failed) -> str:
    """JSON that names the type, which `dump` leaves out as a default."""
    return f'{{"type":"{event.type}",{event.dump()[1:]}'


class Choice(Report):
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Result(Report):
    """The whole answer, kept after the log is gone."""

    job_id: str
    model: str
    state: EndState
    choices: list[Choice]
    usage: Usage
    error: ErrorBody | None = None
