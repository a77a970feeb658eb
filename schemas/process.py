"""What each of our processes begins with: its settings, and a log on stderr."""

import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from schemas.exit_status import BAD_USAGE
from schemas.secret import DEFAULT_FILE, make_secret, read_secret

S = TypeVar("S", bound="Settings")
_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Settings(BaseSettings):
    """The command line wins, then PENSTOCK_... in the environment, then a YAML file."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
        extra="ignore",
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="a YAML file with settings")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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


class SecretSettings(Settings):
    """For those who check keys, tokens or salts. Where there is no file, `penstock up` makes it."""

    server_secret: SecretStr | None = Field(
        None, description="at least 32 characters; better given in the environment"
    )
    server_secret_file: Path = Field(DEFAULT_FILE, description="of mode 0600, where none is given")

    def read_secret(self) -> bytes | None:
        """None where there is none. Raises BadSecret."""
        return read_secret(self._given(), self.server_secret_file)

    def make_secret(self) -> bytes:
        """Read it, or make the file. Raises BadSecret, OSError."""
        return make_secret(self._given(), self.server_secret_file)

    def _given(self) -> str | None:
        return self.server_secret.get_secret_value() if self.server_secret else None


def keep_what_is_loaded() -> None:
    """No garbage collection looks at it again. For a process of our own that is about to serve: the
    modules of an engine's take 130 ms to look at, and every answer waits meanwhile.
    """
    gc.freeze()


def load_settings(settings: type[S], command: str, argv: Sequence[str]) -> S:
    """From the words of the command line and all behind them; wrong ones are named, and exit 2."""
    path = _config_path(argv) or os.environ.get("PENSTOCK_CONFIG")

    class Resolved(settings):  # type: ignore[valid-type, misc]
        __doc__ = settings.__doc__
        model_config = SettingsConfigDict(yaml_file=path, cli_prog_name=command)

    try:
        found: S = CliApp.run(Resolved, cli_args=list(argv))
    except ValidationError as refusal:
        for each in refusal.errors():
            flag = "--" + "-".join(map(str, each["loc"])).replace("_", "-")
            print(f"{command}: {flag}: {each['msg']}", file=sys.stderr)
        raise SystemExit(BAD_USAGE) from None
    return found


def words_of(given: object) -> list[str]:
    """A list whose words may also be given in one, separated by commas."""
    words = given if isinstance(given, list) else [given]
    return [part.strip() for word in words for part in str(word).split(",") if part.strip()]


def write_log_to_stderr(part: str, level: str, logger: logging.Logger | None = None) -> None:
    """One line an occurrence, in UTC. `part` says which process speaks.

    Of an exception it shows type and place. What it says may hold a caller's text.
    """
    formatter = _Formatter(f"%(asctime)s {part}[%(process)d] %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    target = logger or root
    target.handlers[:] = [handler]
    target.setLevel(level.upper())
    target.propagate = False
    logging.captureWarnings(True)
    sys.excepthook = lambda *failure: root.critical("it ended by an error", exc_info=failure)
    threading.excepthook = lambda failed: root.critical(
        "a thread ended by an error",
        exc_info=(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback),
    )


class _Formatter(logging.Formatter):
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "asyncio":  # its later lines show tasks with what they failed by
            record.msg, record.args = record.getMessage().partition("\n")[0], None
        return super().format(record)

    def formatException(self, ei: _Failure) -> str:
        return "\n".join(places(ei[1]))


def places(error: BaseException | None) -> list[str]:
    """Of the error, what caused it and what it is made of: its type, and where it passed."""
    if error is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    own = [type(error).__name__, *(f"  {at.filename}:{at.lineno} in {at.name}" for at in frames)]
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return own + [line for each in (*inner, before) for line in places(each)]


def _config_path(argv: Sequence[str]) -> str | None:
    words = [piece for word in argv for piece in word.split("=", 1)]
    return next((value for flag, value in pairwise(words) if flag == "--config"), None)
