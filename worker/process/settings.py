"""The worker's settings, and what follows from them alone."""

import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import CliSuppress, NoDecode

from penstock.schemas.keys import Lane
from penstock.schemas.markup.forms import CallParser, ReasoningParser
from penstock.schemas.network.event_stream import is_http_url
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import FromJson, words_of
from penstock.schemas.process.tracing import TracingSettings
from penstock.schemas.redis.url import RedisUrlSetting
from penstock.worker.engine.io.config import ComputeSettings, KvEventsConfig, SchedulingSettings
from penstock.worker.engine.io.setting_facts import ChangesTokens, Obeyed, facts, usual
from penstock.worker.models.folder.sentence_folder import pools
from penstock.worker.process.model_folder import model_folder

FAKE = "fake"


class ServedSettings(TracingSettings):
    """The settings of what is served, by which kind of engine, and of its queue."""

    model: str = Field(
        description="a checkpoint's folder, or as s3://bucket/prefix (gs://, az://); a name on the "
        "Hugging Face hub; or penstock-5m"
    )
    tokenizer: str | None = Field(
        None, description="a folder or a name on the hub in place of the model's own"
    )
    revision: str | None = Field(
        None, description="of a model on the hub: a branch, a tag or a commit"
    )
    engine: Annotated[Literal["native", "vllm", "openai"], ChangesTokens(5)] = Field(
        "native",
        description="what computes: Penstock itself; vLLM, where it is installed; or servers that "
        "speak /v1/completions",
    )
    served_model_name: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list, description="names under which jobs ask for it; first: the folder's"
    )
    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    lane: int | None = Field(None, ge=0, description="the one lane to serve; none: all")
    num_lanes: int = Field(
        1, ge=1, le=64, description="hash slots that the model's queue spreads over"
    )


class ModelSettings(ComputeSettings, ServedSettings):
    """The settings of a model: how it is computed, and of its texts and defaults of sampling."""

    generation_config: str = Field(
        "auto",
        description="where defaults of sampling are from: auto, the model's "
        "generation_config.json; vllm, nowhere; or a folder",
    )
    override_generation_config: Annotated[
        FromJson[dict[str, JsonValue]], Obeyed(vectors=False, vllm=True, openai=True)
    ] = Field(default_factory=dict, description="JSON: defaults of sampling that are to be others")
    tool_call_parser: CallParser = Field(
        CallParser("auto"),
        description="form of calls of tools; auto: as the model's template shows it",
    )
    reasoning_parser: ReasoningParser = Field(
        ReasoningParser("auto"),
        description="form of thinking; auto: as the model's template shows it",
    )
    chat_template: Annotated[str | None, ChangesTokens(14)] = Field(
        None, description="a file, or the template itself, in place of the model's own"
    )
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"], ChangesTokens(15)
    ] = Field(
        "auto",
        description="messages' contents as one text, or as OpenAI's lists of parts; auto: as the "
        "template reads them",
    )
    trust_request_chat_template: bool = Field(
        False, description="a chat may bring a template of its own, which can run for ever"
    )


class WorkerSettings(SchedulingSettings, ModelSettings):
    """The settings of a worker. Names and defaults are vLLM's where vLLM has them."""

    # --help and the page of settings begin with the fields of the last of its classes.

    engine_url: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list,
        validate_default=True,
        description="of --engine openai: the servers, each with room for max_num_seqs",
    )
    engine_model: Annotated[str | None, ChangesTokens(6)] = Field(
        None, description="the model's name at those servers; none: the only one that they serve"
    )
    engine_api_key: str | None = Field(
        None, repr=False, description="what those servers ask for, as a bearer token"
    )
    engine_args: Annotated[FromJson[dict[str, JsonValue]], ChangesTokens(7)] = Field(
        default_factory=dict, description="JSON: further arguments of vLLM's engine, by its names"
    )
    model_fingerprint: str | None = Field(
        None,
        pattern=r"^[\w.-]{1,64}$",
        description="jobs go on only at workers of the same; none: a digest of the model's files "
        "and of how it is computed",
    )
    # The fake engine is for tests and measurements; its flags are not in --help.
    fake_step_ms: CliSuppress[float] = Field(
        2.0, ge=0, description="how long a step of the fake engine takes"
    )
    fake_poison: CliSuppress[str] = Field(
        "",
        description="the fake engine fails at prompts that begin "
        "<word>:crash|hang|raise|idle:<token>",
    )
    fake_stamps: CliSuppress[Path | None] = Field(
        None, description="a file where the fake engine notes when it made each token"
    )

    lease_ttl_ms: int = Field(5000, ge=100, description="a worker unheard for this long is dead")
    orphan_grace_ms: int = Field(
        10_000, ge=100, description="a foreground job that nobody hears for this long is cancelled"
    )
    drain_s: float = Field(30.0, ge=0, description="decode on for this long after SIGTERM")
    sleep_idle_s: Annotated[float | None, Obeyed()] = Field(
        None,
        gt=0,
        description="after so long without work the model's memory is given back; a job wakes it",
    )
    step_timeout_s: float = Field(30.0, gt=0, description="a step that takes longer is wedged")
    crash_dump_folder: Path | None = Field(
        None, description="where a file tells of each crash, the latest 16; not with --in-process"
    )
    cache_salt_secret: str = Field(
        default_factory=lambda: secrets.token_hex(32),
        min_length=16,
        repr=False,
        description="tenants' prefix caches are apart by a digest of this and their name; "
        "none: drawn at the start, since no cache outlives its worker",
    )
    metrics_max_tenants: int = Field(
        20, ge=0, le=1000, description="tenants whose tokens the worker's statistics tell apart"
    )
    in_process: bool = Field(False, description="everything in one process, to debug it")

    @field_validator("*")
    @classmethod
    def means_something_to_the_engine(cls, value: object, info: ValidationInfo) -> object:
        name, engine = info.field_name or "", info.data.get("engine", "native")
        fact = facts(cls, Obeyed).get(name)
        obeys = engine == "native" or fact is None or fact.by(engine)
        if not obeys and value != usual(cls, name):
            raise ValueError(f"--engine {engine} does not obey it; leave it out")
        return value

    @field_validator("engine_url")
    @classmethod
    def is_given_for_servers(cls, urls: list[str], info: ValidationInfo) -> list[str]:
        engine = info.data.get("engine")
        if engine == "openai" and not urls:
            raise ValueError("--engine openai needs the URL of a server")
        if engine != "openai" and urls:
            raise ValueError("only --engine openai asks servers")
        for url in urls:
            if not is_http_url(url):
                raise ValueError(f"{url!r} is no http:// or https:// URL")
            if "@" in urlsplit(url).netloc:
                raise ValueError("a name and password in it have no effect; use engine_api_key")
        return urls

    @field_validator("engine_args")
    @classmethod
    def is_given_for_vllm(
        cls, args: dict[str, JsonValue], info: ValidationInfo
    ) -> dict[str, JsonValue]:
        if args and info.data.get("engine") != "vllm":
            raise ValueError("only --engine vllm takes such arguments")
        return args

    @field_validator("kv_events_config")
    @classmethod
    def has_a_cache_to_tell_of(cls, config: KvEventsConfig, info: ValidationInfo) -> KvEventsConfig:
        if config.enable_kv_cache_events and not info.data.get("enable_prefix_caching", True):
            raise ValueError("it tells of the prefix cache, which enable_prefix_caching turns off")
        return config

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return how the prefix cache is told of, or None where it is not."""
        return self.kv_events_config if self.kv_events_config.enable_kv_cache_events else None

    @property
    def is_fake(self) -> bool:
        return self.load_format == FAKE

    def checkpoint(self) -> Path:
        """Return the model's folder, fetched as far as the engine needs it. Raises InvalidJob."""
        has_weights = self.engine != "openai"
        return model_folder(self.model, has_weights, self.trust_remote_code, self.revision)

    def tokenizer_folder(self) -> Path:
        """Return the folder of the tokenizer and its chat template. Raises InvalidJob."""
        if self.tokenizer is None:
            return self.checkpoint()
        return model_folder(self.tokenizer, with_weights=False, param="tokenizer")

    @property
    def pools(self) -> bool:
        """Return whether the engine makes vectors of texts. Raises a ModelError, or InvalidJob."""
        if self.runner == "auto":
            return self.engine == "native" and not self.is_fake and pools(self.checkpoint())
        return self.runner == "pooling"

    @property
    def names(self) -> list[str]:
        return self.served_model_name or [Path(self.model).name]

    def lanes(self) -> list[Lane]:
        numbers = range(self.num_lanes) if self.lane is None else [self.lane]
        return [Lane(name, number) for name in self.names for number in numbers]

    def cache_config(self) -> dict[str, str]:
        """Return what the metric `cache_config_info` tells of the settings."""
        return {
            "cache_dtype": self.dtype,
            "enable_prefix_caching": str(self.enable_prefix_caching),
            "gpu_memory_utilization": str(self.gpu_memory_utilization),
            "num_gpu_blocks_override": str(self.num_gpu_blocks_override),
        }

    def cache_salt(self, tenant: str, salt: str | None) -> bytes:
        """Return the salt that keeps a tenant's cached blocks apart from those of others.

        A salt that a job asks for is mixed in, and never counts alone.
        """
        secret = f"{len(tenant)}:{tenant}{salt or ''}".encode()
        return hashlib.blake2b(
            secret, key=self.cache_salt_secret.encode()[:64], digest_size=16
        ).digest()


def pulse_every_s(settings: WorkerSettings) -> float:
    """Return the seconds between pulses: a fifth of a lease, so that a late pulse costs nothing.

    It is at most one second.
    """
    return min(1.0, settings.lease_ttl_ms / 5000)
