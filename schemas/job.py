"""A job: what a caller enqueued. It is stored once, as JSON, and never changed."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from schemas.sampling import SamplingParams, TokenId
from schemas.wire import Wire

MAX_PROMPTS = 64
MAX_MESSAGES = 2048
DEFAULT_TENANT = "default"

PriorityClass = Literal["high", "normal", "batch"]
Prompt = str | list[TokenId]
Message = dict[str, JsonValue]


class Chat(Wire):
    """A conversation, rendered by the model's own chat template in the worker."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, JsonValue]] = Field(default_factory=list, max_length=128)
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Job(Wire):
    """One claim, one log, one end; `len(prompts) * n` sequences in the engine.

    Choice `i` answers prompt `i // n`. Without a seed the job's id seeds it, so every attempt at
    the job draws the same tokens.
    """

    job_id: str
    model: str
    prompts: list[Prompt] = Field(default_factory=list, max_length=MAX_PROMPTS)
    chat: Chat | None = None
    params: SamplingParams = SamplingParams()
    tenant: str = DEFAULT_TENANT
    priority_class: PriorityClass = "normal"
    background: bool = Field(False, description="runs on although nobody listens")
    timeout_ms: int | None = Field(None, ge=1, description="from submission to the end")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    traceparent: str | None = None

    @model_validator(mode="after")
    def asks_something(self) -> Self:
        if bool(self.prompts) == (self.chat is not None):
            raise ValueError("prompts: give either prompts or chat")
        if any(len(prompt) == 0 for prompt in self.prompts):
            raise ValueError("prompts: a prompt is empty; give at least one token")
        return self

    @property
    def num_choices(self) -> int:
        return max(1, len(self.prompts)) * self.params.n
