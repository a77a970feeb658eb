"""The start of each of our processes: its settings, and a log on stderr."""

import gc
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Container, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.nearby import ANYWHERE, nearby
from penstock.schemas.process.secret import DEFAULT_FILE, make_secret, read_secret
from penstock.schemas.process.setting_names import (
    PREFIX,
    did_you_mean,
    nearest,
    unknown_keys,
    unknown_variables,
)
from penstock.schemas.redis.url import shown

LOG_FIELDS = ("job", "trace_id")
S = TypeVar("S", bound="Settings")
T = TypeVar("T")
_Failure = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class Settings(BaseSettings):
    """The command line wins, then PENSTOCK_... in the environment, then a YAML file."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_prefix_target="all",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
        extra="ignore",
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="a YAML file with settings")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least that is logged"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json: one object a line, with job and trace_id where it is of a job"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


class SecretSettings(Settings):
    """Settings to check keys, tokens or salts. `penstock up` makes the file if there is none."""

    server_secret: SecretStr | None = Field(
        None, description="at least 32 characters; better given in the environment"
    )
    server_secret_file: Path = Field(DEFAULT_FILE, description="of mode 0600, where none is given")

    def read_secret(self) -> bytes | None:
        """Return the server secret, or None where there is none. Raises BadSecret."""
        return read_secret(self._given(), self.server_secret_file)

    def make_secret(self) -> bytes:
        """Read the server secret, or make its file. Raises BadSecret, OSError."""
        return make_secret(self._given(), self.server_secret_file)

    def _given(self) -> str | None:
        return self.server_secret.get_secret_value() if self.server_secret else None


def keep_what_is_loaded() -> None:
    """Exclude all objects that exist now from garbage collection.

    It is for a process of our own that is about to serve. To look at the modules of an engine's
    process takes a collection 130 ms, and every answer waits meanwhile.
    """
    gc.freeze()


def load_settings(settings: type[S], command: str, argv: Sequence[str]) -> S:
    """Return settings from the command line, the environment and the YAML file, in this order.

    Wrong ones are named on stderr, and the process exits with status 2. Where nothing says which
    Redis is meant, it is that of the `penstock up` that runs here.
    """
    try:
        return read_settings(settings, command, argv)
    except WrongSettings as wrong:
        for sentence in (*wrong.sentences, *unknown_variables(os.environ)):
            print(f"{command}: {sentence}", file=sys.stderr)
        raise SystemExit(BAD_USAGE) from None


def read_settings(
    settings: type[S], command: str, argv: Sequence[str], redis_url: str | None = None
) -> S:
    """Read settings as `load_settings` does. Raises WrongSettings.

    `redis_url` is the Redis of a process that runs already: it is kept where nothing names another.
    """
    defaults = {} if redis_url is None else {"redis_url": redis_url}
    path = _config_path(argv) or os.environ.get("PENSTOCK_CONFIG")
    return _resolved(settings, command, argv, defaults | _filed(path), path)


class WrongSettings(Exception):
    """Raised for settings that cannot be used, with a sentence for each."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = sentences


def _resolved(
    settings: type[S],
    command: str,
    argv: Sequence[str],
    behind: dict[str, object],
    path: str | None,
) -> S:
    class Resolved(settings):  # type: ignore[valid-type, misc]
        __doc__ = settings.__doc__
        model_config = SettingsConfigDict(cli_prog_name=command, cli_exit_on_error=False)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file_settings = InitSettingsSource(settings_cls, behind)
            return init_settings, env_settings, file_settings, _Nearby(settings_cls, command)

    try:
        result: S = CliApp.run(Resolved, cli_args=list(argv))
    except SettingsError as refusal:
        raise WrongSettings(_of_words(str(refusal), Resolved)) from None
    except ValidationError as refusal:
        wrong = [(_words(error["loc"]), error["msg"]) for error in refusal.errors()]
        raise WrongSettings(
            *(
                f"{_place(words, argv, behind, path)}: {message.removeprefix('Value error, ')}"
                for words, message in wrong
            )
        ) from None
    if unknown_variables(os.environ):
        raise WrongSettings
    return result


class _Nearby(PydanticBaseSettingsSource):
    """The last source of a command's Redis: the `penstock up` that runs on this machine."""

    def __init__(self, settings_cls: type[BaseSettings], command: str) -> None:
        super().__init__(settings_cls)
        self._command = command

    def __call__(self) -> dict[str, str]:
        field = self.settings_cls.model_fields.get("redis_url")
        if field is None or field.default != ANYWHERE or "redis_url" in self.current_state:
            return {}
        urls = nearby()
        if len(urls) > 1:
            names = ", ".join(map(shown, urls))
            raise WrongSettings(f"--redis-url: several `penstock up` run here, name one: {names}")
        if not urls:
            return {}
        sentence = f"the server is that of the `penstock up` that runs here, {shown(urls[0])}"
        print(f"{self._command}: {sentence}", file=sys.stderr)
        return {"redis_url": urls[0]}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[None, str, bool]:
        return None, field_name, False


def _filed(path: str | None) -> dict[str, object]:
    """Return the settings of a YAML file, none where no path is given."""
    if path is None:
        return {}
    import yaml  # most processes have no such file, and each would be later

    try:
        content: object = yaml.safe_load(Path(path).expanduser().read_text()) or {}
    except OSError as error:
        raise WrongSettings(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = " ".join(str(error).split())
        raise WrongSettings(f"--config: {path} is not YAML: {place}") from None
    if not isinstance(content, dict):
        raise WrongSettings(
            f"--config: {path} must have a setting a line, as in max_model_len: 4096"
        )
    if sentences := unknown_keys(content):
        raise WrongSettings(*(f"--config: {path}: {sentence}" for sentence in sentences))
    return {str(key): value for key, value in content.items()}


def _words(place: tuple[int | str, ...]) -> list[str]:
    """Return the words of the flag's name, without the numbers of its values."""
    return [word for word in place if isinstance(word, str)]


def _place(
    words: Sequence[str], argv: Sequence[str], behind: Container[str], path: str | None
) -> str:
    """Return where a wrong value stands: its flag, else its variable, else the file and its key."""
    flag, name = f"--{'-'.join(words).replace('_', '-')}", words[0] if words else ""
    own = f"--{name.replace('_', '-')}"
    if any(arg.split("=", 1)[0].split(".", 1)[0] in (own, f"--no-{own[2:]}") for arg in argv):
        return flag
    if name and (variable := PREFIX + name.upper()) in os.environ:
        return f"{variable} in the environment"
    return f"{path}: {'.'.join(words)}" if path and name in behind else flag


def _of_words(refusal: str, settings: type[Settings]) -> str:
    """Return a sentence on what is wrong with the command line, and what was probably meant."""
    message = refusal.removeprefix("error parsing CLI: ")
    match = re.match(r"unrecognized arguments: (--)?([^ =]+)", message)
    if match is None:
        return f"{message} (--help lists all)"
    dashes, word = match[1] or "", match[2]
    guesses = [f"--{name.replace('_', '-')}" for name in nearest(word, settings.model_fields)]
    return f"{dashes}{word} is not known{did_you_mean(guesses)} (--help lists all)"


def words_of(value: object) -> list[str]:
    """Return a list of words, which may also be one text: separated by commas, or a list in JSON.

    Raises ValueError.
    """
    if isinstance(value, str) and value.startswith("["):
        value = object_of(value)
    words = value if isinstance(value, list) else [value]
    return [part.strip() for word in words for part in str(word).split(",") if part.strip()]


def object_of(value: object) -> object:
    """Return an object, which may also be given as a text in JSON. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


FromJson = Annotated[T, NoDecode, BeforeValidator(object_of)]


def write_log_to_stderr(
    part: str, settings: Settings, logger: logging.Logger | None = None
) -> None:
    """Write the log to stderr, one line for each record, with times in UTC.

    `part` names the process that writes. An exception is shown by its type and place alone, since
    its message may hold a caller's text.
    """
    formatter = _Formatter(f"%(asctime)s {part}[%(process)d] %(levelname)s %(message)s")
    if settings.log_format == "json":
        formatter = _JsonFormatter(part)
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    target = logger or root
    target.handlers[:] = [handler]
    target.setLevel(settings.log_level.upper())
    target.propagate = False
    logging.captureWarnings(True)
    sys.excepthook = lambda *failure: root.critical("it ended by an error", exc_info=failure)
    threading.excepthook = lambda failure: root.critical(
        "a thread ended by an error",
        exc_info=(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback),
    )


class _Formatter(logging.Formatter):
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "asyncio":  # its later lines show tasks with their errors' texts
            record.msg, record.args = record.getMessage().partition("\n")[0], None
        return super().format(record)

    def formatException(self, ei: _Failure) -> str:
        return "\n".join(places(ei[1]))


class _JsonFormatter(_Formatter):
    """One JSON object a record. `job` and `trace_id` are those that the record was given."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        message, *places = super().format(record).split("\n")
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "part": self._part,
            "pid": record.process,
            "message": message,
        }
        fields |= {name: record.__dict__[name] for name in LOG_FIELDS if name in record.__dict__}
        return json.dumps(fields | ({"places": places} if places else {}))


def places(error: BaseException | None) -> list[str]:
    """Return the type of an error and the places that it passed, then those of its causes.

    The errors of a group count as causes.
    """
    if error is None:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    own = [type(error).__name__, *(f"  {at.filename}:{at.lineno} in {at.name}" for at in frames)]
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return own + [line for cause in (*inner, before) for line in places(cause)]


def _config_path(argv: Sequence[str]) -> str | None:
    words = [piece for word in argv for piece in word.split("=", 1)]
    return next((value for flag, value in pairwise(words) if flag == "--config"), None)
