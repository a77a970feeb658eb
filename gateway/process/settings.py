"""The gateway's settings."""

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from penstock.gateway.files.files import FilesSettings
from penstock.gateway.process.listening import ListenSettings
from penstock.gateway.webhooks.outbound import OutboundSettings
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import SecretSettings, words_of
from penstock.schemas.process.tracing import TracingSettings
from penstock.schemas.redis.group_sync import Durability
from penstock.schemas.redis.url import RedisUrlSetting

# What a gateway takes over while it serves, on SIGHUP. All others need a restart.
RELOADABLE = frozenset(
    {
        "api_key",
        "enable_force_include_usage",
        "enable_per_request_metrics",
        "log_format",
        "log_level",
        "max_body_bytes",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_stored_bytes",
        "ping_s",
        "return_tokens_as_token_ids",
        "webhook_private",
        "webhook_public",
    }
)


class GatewaySettings(
    ListenSettings, SecretSettings, OutboundSettings, FilesSettings, TracingSettings
):
    """Serve HTTP in front of the queue."""

    fd: int | None = Field(
        None, ge=3, description="a socket that listens already, handed down by who started this"
    )
    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    durability: Durability = Field(
        "server",
        description="fsync: accept and show only what is on the server's disk; "
        "replicas: and on the disk of one that follows it",
    )
    api_key: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list, description="keys that are let in; none: everybody is"
    )
    require_api_keys: bool = Field(
        False, description="let nobody in without a key, even where none was made yet"
    )
    open_metrics: bool = Field(False, description="/metrics needs no key")
    allowed_origins: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        default_factory=list,
        description="pages from here may call from a browser, as https://app.example; *: any",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="what stands before all paths where a proxy serves this, as /llm",
    )
    disable_fastapi_docs: bool = Field(False, description="no /docs and no /openapi.json")
    metrics_max_tenants: int = Field(
        20, ge=0, le=1000, description="tenants whose tokens /metrics tells apart, by name"
    )
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1, description="larger bodies get 413")
    head_timeout_s: float = Field(15.0, gt=0, description="for a request's head to arrive whole")
    body_timeout_s: float = Field(60.0, gt=0, description="for its body, after the head")
    stall_timeout_s: float = Field(
        300.0,
        gt=0,
        description="who takes nothing of an answer, or is gone without a word, is cut off",
    )
    keep_alive_s: int = Field(30, ge=1, description="an idle connection is closed after this")
    max_connections: int = Field(20_000, ge=1, description="one more gets 503 at once")
    max_open_reads: int = Field(
        2000, ge=1, description="streams of jobs asked for elsewhere, of one key; more get 429"
    )
    ping_s: float = Field(10.0, gt=0, description="a stream silent for this long says `: ping`")
    share_equal_jobs: bool = Field(
        False,
        description="requests that ask the same, greedily or with a seed, at the same time are"
        " computed once; of a tenant, in the foreground, not stored",
    )
    max_num_queued_reqs: int = Field(10_000, ge=1, description="a lane that holds more gets 429")
    max_num_queued_tokens: int | None = Field(
        None, ge=1, description="so do prompts of more tokens, by a guess, that wait in a lane"
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="/tokenizer_info tells a tokenizer's configuration and chat template"
    )
    enable_per_request_metrics: bool = Field(
        False, description="each chat and completion says how long it took, as by `include_metrics`"
    )
    responses_kept_s: int = Field(
        3600, ge=1, le=31_536_000, description="how long /v1/responses keeps what is to be stored"
    )
    conversations_kept_s: int = Field(
        2_592_000, ge=1, le=31_536_000, description="how long a conversation is kept when not used"
    )
    enable_force_include_usage: bool = Field(
        False, description="each chunk of a stream has the usage up to it"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="log probabilities name tokens by their ids, as token_id:5"
    )
    max_stored_bytes: int = Field(
        2**30,
        ge=1,
        description="what a tenant may have stored, in Redis and on disk; a key may set another",
    )
    drain_s: int = Field(30, ge=0, description="open streams may run on this long after SIGTERM")
