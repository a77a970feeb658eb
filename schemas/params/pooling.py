"""Pooling parameters: what a job wants to have made of its prompts other than text."""

import base64
import sys
from array import array
from typing import Annotated, Literal

from pydantic import Field

from penstock.schemas.wire.wire import Wire

MAX_INPUTS = 2048  # inputs of one job, as OpenAI has it

PoolingTask = Literal["embed", "classify", "score"]


class PoolingParams(Wire):
    """The parameters of a job that gets a vector for each prompt.

    task            embed: a prompt's embedding; classify: a number for each of the model's labels;
                    score: one number, how well the prompt answers a query. None: what the model
                    makes of a prompt alone
    dimensions      how many of an embedding: the first, scaled to length 1 where the whole is
    use_activation  scale an embedding to length 1, make probabilities of a classifier's numbers
    truncate_prompt_tokens  cut off what is beyond so many tokens; -1: beyond what the model takes.
                    Without it a prompt that is too long is an error
    prompt_name     one of the texts that the model's folder names; it goes before each prompt
    queries         what scores are to: one text for all prompts, or one for each
    """

    task: PoolingTask | None = None
    dimensions: int | None = Field(None, ge=1)
    use_activation: bool | None = Field(None, description="none: as the model's folder says")
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_name: Annotated[str, Field(max_length=256)] | None = None
    queries: list[str] = Field(default_factory=list, max_length=MAX_INPUTS, fail_fast=True)


def to_base64(numbers: bytes) -> str:
    """Return a vector's text: its numbers as float32, the lower bytes first, in base64."""
    return base64.b64encode(numbers).decode("ascii")


def from_base64(text: str) -> list[float]:
    """Return the numbers of a vector's text."""
    return floats_of(base64.b64decode(text))


def floats_of(buffer: bytes) -> list[float]:
    """Return numbers that are float32, the lower bytes first."""
    numbers = array("f", buffer)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
