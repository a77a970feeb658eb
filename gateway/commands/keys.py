"""penstock keys create | list | change | revoke: commands for the API keys in Redis."""

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import CliPositionalArg, NoDecode
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.gateway.auth.api_key import DEFAULT_SCOPES, ApiKey, Scope
from penstock.gateway.auth.key_desk import KeyChange, KeyDesk, KeyNotFound, KeyRequest
from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.commands.terminal import CommandRefused, OperatorCommand, dispatch
from penstock.schemas.account import Quota
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import DEFAULT_TENANT, PriorityClass
from penstock.schemas.process.secret import mark_of
from penstock.schemas.process.start import SecretSettings, Settings, words_of
from penstock.schemas.redis.connection import connect

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
COPY_IT = (
    "a key made now would let nobody in. Give theirs by PENSTOCK_SERVER_SECRET, or copy "
    "~/.penstock/secret from where it was made (mode 0600); to change it, restart a gateway first"
)
USAGE = "usage: penstock keys create | list | change ID | revoke ID [--flag VALUE ...]"


def _seconds(value: object) -> object:
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", str(value))
    if value is None:
        return None
    if match is None:
        raise ValueError(f"{value!r}: give a number with s, m, h or d, such as 30d")
    return int(match[1]) * UNITS_S[match[2]]


class KeysCommand(OperatorCommand):
    async def run(self, store: KeyStore) -> None:
        raise NotImplementedError

    def say(self, keys: Sequence[ApiKey], words: str) -> None:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(keys))
        print(words, end="")


class LimitFlags(Settings):
    requests_per_minute: int | None = Field(None, description="of one model, as all limits")
    tokens_per_minute: int | None = Field(None, description="of prompts and completions")
    max_running: int | None = Field(None, description="jobs that a worker has; others wait")
    max_queued: int | None = Field(None, description="jobs that wait; others are refused")
    tokens_per_day: int | None = Field(None, description="of UTC; then jobs stop")
    tokens_per_month: int | None = None
    max_stored_bytes: int | None = Field(
        None, description="of its tenant, by this key; none: as the gateway has it"
    )
    weight: float = Field(1.0, description="share beside other tenants")


class Create(KeysCommand, SecretSettings, LimitFlags):
    """Make a key and show it, once. Give it to a client as its bearer token."""

    name: str = Field("", description="for people")
    tenant: str = Field(DEFAULT_TENANT, description="whose jobs it makes and finds")
    scopes: Annotated[list[Scope], NoDecode, BeforeValidator(words_of)] = Field(
        list(DEFAULT_SCOPES), description="of inference, jobs, batches, metrics; admin: all"
    )
    max_priority: PriorityClass = Field("normal", description="what asks for more gets this")
    expires: Annotated[int | None, BeforeValidator(_seconds)] = Field(
        None, description="30d, 12h, 15m; none: never"
    )

    async def run(self, store: KeyStore) -> None:
        desk = KeyDesk(store, await self._secret(store))
        record: dict[str, object] = {
            "name": self.name,
            "tenant": self.tenant,
            "scopes": tuple(self.scopes),
            "limits": {name: getattr(self, name) for name in Quota.model_fields},
            "max_priority": self.max_priority,
            "expires_in_s": self.expires,
        }
        try:
            text, key = await desk.make(KeyRequest.model_validate(record))
        except ValidationError as error:
            raise CommandRefused(_error_text(error)) from None
        except InvalidJob as error:
            raise CommandRefused(f"--{error.message.replace('_', '-')}") from None
        if self.as_json:
            print(json.dumps({"key": text} | key.shown()))
        else:
            self.say([key], f"{text}\nIt is not shown again: only its digest is kept.\n")

    async def _secret(self, store: KeyStore) -> bytes:
        """Return the secret that the gateways check keys with, made here if there is none yet.

        Raises CommandRefused, BadSecret, OSError.
        """
        mark, own = await store.mark(), self.read_secret()
        if mark is not None and own is None:
            raise CommandRefused(f"no server secret is here, and the gateways have one: {COPY_IT}")
        if mark is not None and own is not None and mark != mark_of(own):
            raise CommandRefused(f"the server secret here is not that of the gateways: {COPY_IT}")
        secret = own or self.make_secret()
        await store.note_mark(mark_of(secret))
        return secret


class ListKeys(KeysCommand):
    """List all keys ever made, without their secrets."""

    async def run(self, store: KeyStore) -> None:
        keys = await store.all()
        if self.as_json:
            print(json.dumps([key.shown() for key in keys]))
        else:
            self.say(keys, "")


class Change(KeysCommand, LimitFlags):
    """Give a key other limits, or another name; what is not given stays. `null` drops a limit."""

    key_id: CliPositionalArg[str] = Field(description="what stands between the underscores")
    name: str | None = Field(None, description="for people")

    async def run(self, store: KeyStore) -> None:
        names = Quota.model_fields.keys() & self.model_fields_set
        limits = {name: getattr(self, name) for name in names}
        try:
            changes = KeyChange.model_validate({"name": self.name, "limits": limits})
        except ValidationError as error:
            raise CommandRefused(_error_text(error)) from None
        try:
            key = await KeyDesk(store, None).change(self.key_id, changes)
        except KeyNotFound as error:
            raise CommandRefused(f"{error}; `penstock keys list` shows all") from None
        if self.as_json:
            print(json.dumps(key.shown()))
        else:
            self.say([key], "")


class Revoke(KeysCommand):
    """Refuse a key from now on, and end its streams and jobs. It takes some seconds."""

    key_id: CliPositionalArg[str] = Field(description="what stands between the underscores")

    async def run(self, store: KeyStore) -> None:
        """Mark the key as revoked. A second time changes nothing."""
        try:
            key = await KeyDesk(store, None).revoke(self.key_id)
        except KeyNotFound as error:
            raise CommandRefused(f"{error}; `penstock keys list` shows all") from None
        print(json.dumps(key.shown()) if self.as_json else f"{key.key_id} is revoked")


COMMANDS: dict[str, type[KeysCommand]] = {
    "create": Create,
    "list": ListKeys,
    "change": Change,
    "revoke": Revoke,
}


def main(argv: Sequence[str]) -> int:
    return dispatch("penstock keys", USAGE, COMMANDS, argv, _run)


async def _run(command: KeysCommand) -> None:
    redis = connect(command.redis_url)
    try:
        await command.run(KeyStore(redis))
    finally:
        await redis.aclose()


def _table(keys: Sequence[ApiKey]) -> Table:
    names = ("id", "name", "tenant", "scopes", "limits", "priority", "made", "expires", "state")
    table = Table(*names)
    for key in keys:
        limits = key.limits.model_dump(exclude_defaults=True)
        table.add_row(
            key.key_id,
            escape(key.name),
            key.tenant,
            " ".join(key.scopes),
            "\n".join(f"{name} {most:g}" for name, most in limits.items()),
            key.max_priority,
            _minute(key.created_s),
            "never" if key.expires_s is None else _minute(key.expires_s),
            key.state(time.time()),
        )
    return table


def _minute(time_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(time_s))


def _error_text(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    return f"--{first['loc'][-1]}: {first['msg']}".replace("_", "-")
