"""Cards that describe served models and workers, so that no worker need be asked."""

from typing import Literal

from pydantic import Field, JsonValue

from penstock.schemas.keys import Lane
from penstock.schemas.wire.wire import Report


class ModelCard(Report):
    """The configuration of a served model. It outlives the workers, so jobs can wait for them."""

    name: str = Field(min_length=1, max_length=256)
    lanes: int = Field(1, ge=1, le=64, description="hash slots that the model's queue spreads over")
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and completion")
    created_s: int = 0
    fingerprint: str = Field("", description="digest of weights and numerics: equal, equal tokens")
    features: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def task(self) -> str:
        """Return what the model is for: `generate`, or the first that it makes of a text."""
        return str(self.features.get("task", "generate"))

    @property
    def chats(self) -> bool:
        return self.task == "generate" and self.features.get("chat") is not False

    def lane(self, number: int) -> Lane:
        return Lane(self.name, number)


WorkerOrder = Literal["drain", "sleep", "wake", "reset_prefix_cache"]


class WorkerCard(Report):
    """A worker's description of itself, given when it registers, drains, sleeps or wakes."""

    model: str = Field("", description="its first name, under which its engine's figures stand")
    host: str = ""
    pid: int = 0
    max_num_seqs: int = 0
    fingerprint: str = ""
    resumes: Literal["tokens", "text"] = "tokens"
    version: str = ""
    cache_config: dict[str, str] = Field(
        {}, description="settings of the KV cache, under vLLM's names"
    )
    draining: bool = Field(False, description="takes nothing new, and is about to end")
    sleeps: bool = Field(False, description="can sleep, and forget what its prefix cache holds")
    asleep: bool = Field(False, description="takes nothing new until it is told to wake")

    @property
    def takes_jobs(self) -> bool:
        return not (self.draining or self.asleep)
