"""The gateway's settings: command line, then PENSTOCK_... in the environment, then a YAML file."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)


class Settings(BaseSettings):
    """HTTP in front of the queue."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_",
        cli_prog_name="penstock gateway",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
        extra="ignore",
    )

    config: Path | None = Field(None, description="a YAML file with settings")
    host: str = Field("127.0.0.1", description="the address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the queue is")
    api_key: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="keys that are let in; none: everybody is"
    )
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1, description="larger bodies get 413")
    ping_s: float = Field(10.0, gt=0, description="a stream silent for this long says `: ping`")
    max_num_queued_reqs: int = Field(10_000, ge=1, description="a lane that holds more gets 429")
    drain_s: int = Field(30, ge=0, description="open streams may run on this long after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("api_key", mode="before")
    @classmethod
    def keys_are_separated_by_commas(cls, given: object) -> object:
        words = given if isinstance(given, list) else [given]
        return [key.strip() for word in words for key in str(word).split(",") if key.strip()]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


def load_settings(argv: Sequence[str]) -> Settings:
    """From the command line's words and everything behind them."""
    path = _config_path(argv) or os.environ.get("PENSTOCK_CONFIG")

    class Resolved(Settings):
        model_config = SettingsConfigDict(yaml_file=path)

    return CliApp.run(Resolved, cli_args=list(argv))


def _config_path(argv: Sequence[str]) -> str | None:
    words = [piece for word in argv for piece in word.split("=", 1)]
    return next((value for flag, value in pairwise(words) if flag == "--config"), None)
