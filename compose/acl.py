"""`penstock acl`: prints users of Redis, one per role, each allowed what it needs and no more.

The lines go into the server's `aclfile`, or after `ACL SETUSER` without their first word.
"""

import hashlib
import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from penstock.schemas.keys import MODELS, NAMESPACE
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.redis.script import SCRIPTS

PROGRAM = "penstock acl"
CALL = re.compile(r"(?:redis\.p?call\(|\{)\s*'([A-Z]{2,})'")  # also in a table that is unpacked
LANES = f"{NAMESPACE}:{{*:*}}:*"  # every key and channel of every lane
BASICS = "auth hello ping echo select eval evalsha info role wait cluster|slots pubsub|numsub"
HEARS = "subscribe unsubscribe"
KNOW_SECRET = ("gateway", "operator")  # who checks API keys, or makes them


@dataclass(frozen=True, slots=True)
class Role:
    """The keys, channels and commands that a user of Redis may use.

    `keys`, `read_keys` and `channels` are patterns; `read_keys` are read only. `commands` are
    allowed besides those that scripts call, unless the role runs none.
    """

    name: str
    keys: tuple[str, ...]
    read_keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: str
    runs_scripts: bool = True


ROLES = (
    Role(
        "gateway",
        (f"{NAMESPACE}:*",),
        (),
        (LANES,),
        f"{HEARS} xread hvals hgetall mget exists zrevrange hsetnx hdel",
    ),
    Role("worker", (LANES, MODELS), (), (LANES,), f"{HEARS} xread hvals"),
    Role("client", (LANES,), (MODELS,), (LANES,), f"{HEARS} hvals"),
    Role(
        "housekeeping",
        (f"{NAMESPACE}:*", "arq:*"),
        (),
        (LANES,),
        f"{HEARS} @read @write @transaction @string @hash @set @sortedset @stream -@dangerous info",
    ),
    Role(
        "operator",
        (f"{NAMESPACE}:*", "arq:*"),
        (),
        (LANES,),
        f"{HEARS} @read @write @keyspace -flushall -flushdb -@admin client|list slowlog|get",
    ),
    Role(
        "router",  # a router of somebody else's: it sees what is cached where, and no job
        (),
        (f"{NAMESPACE}:{{*:*}}:worker:*:kv_*", f"{NAMESPACE}:{{*:*}}:workers", MODELS),
        (),
        "xread xrange hgetall hget zrange zscore hvals exists",
        runs_scripts=False,
    ),
)


class AclSettings(Settings):
    """Print the ACL lines of every role, with new passwords; the passwords go to stderr.

    With --into they go into files instead: users.acl for the server, in which the user `default` is
    off, ROLE.yaml for the --config of each role, and a new server secret. Where they are there they
    stay as they are. With --apart each role can be given its own alone.
    """

    fsync: bool = Field(
        False, description="for durability=fsync and replicas: WAITAOF, which old servers lack"
    )
    redis_6: bool = Field(
        False,
        description="for servers before Redis 7, where who may read a key may write it: `client` "
        "then changes the list of models",
    )
    into: Path | None = Field(None, description="a folder for files of mode 0600")
    apart: bool = Field(
        False, description="a folder for each role in that one, and `redis` for the server"
    )
    redis_at: str = Field("127.0.0.1:6379", description="the server's address, for the files")

    @model_validator(mode="after")
    def has_files_for_the_address(self) -> Self:
        of_files = self.model_fields_set & {"redis_at", "apart"}
        if self.into is None and of_files:
            raise ValueError(f"{min(of_files)}: is of the files of --into; give that one too")
        return self


def script_commands() -> list[str]:
    """Return the commands that scripts call. A script runs with the rights of its caller."""
    texts = (path.read_text() for path in SCRIPTS.rglob("*.lua"))
    return sorted({name.lower() for text in texts for name in CALL.findall(text)})


def line(role: Role, password: str, has_waitaof: bool, is_redis_6: bool = False) -> str:
    """Return the role's line of an `aclfile`. What it does not name is forbidden."""
    read_prefix = "~" if is_redis_6 else "%R~"
    words = f"{BASICS} {role.commands}".split() + (["waitaof"] if has_waitaof else [])
    calls = [word for word in script_commands() if word != "pubsub"] if role.runs_scripts else []
    commands = [word if word[0] in "+-" else f"+{word}" for word in [*calls, *words]]
    return " ".join(
        [
            f"user {role.name} reset resetchannels on",  # Redis 6.2 allows all channels by default
            f"#{hashlib.sha256(password.encode()).hexdigest()}",
            *(f"~{pattern}" for pattern in role.keys),
            *(f"{read_prefix}{pattern}" for pattern in role.read_keys),
            *(f"&{pattern}" for pattern in role.channels),
            "-@all",
            *commands,
        ]
    )


def main(argv: list[str]) -> int:
    settings = load_settings(AclSettings, PROGRAM, argv)
    passwords = {role: secrets.token_urlsafe(24) for role in ROLES}
    flags = settings.fsync, settings.redis_6
    lines = [line(role, password, *flags) for role, password in passwords.items()]
    if settings.into is None:
        for acl_line, (role, password) in zip(lines, passwords.items(), strict=True):
            print(acl_line)
            print(f"redis://{role.name}:{password}@...", file=sys.stderr)
        return 0
    try:
        _write(FilePlaces(settings.into, settings.apart), settings.redis_at, lines, passwords)
    except OSError as error:
        print(f"{PROGRAM}: --into: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """Where the files lie: all in one folder, or those of each reader in one of its own."""

    folder: Path
    are_apart: bool

    def at(self, reader: str, name: str) -> Path:
        return self.folder / reader / name if self.are_apart else self.folder / name


def _write(places: FilePlaces, redis_at: str, lines: list[str], passwords: dict[Role, str]) -> None:
    """Write the files, users.acl last: where it is there, all are, and nothing is changed."""
    users = places.at("redis", "users.acl")
    if users.exists():
        print(f"{users} is there already, and stays")
        return
    for role, password in passwords.items():
        url = f"redis://{role.name}:{password}@{redis_at}/0"
        _put(places.at(role.name, f"{role.name}.yaml"), f"redis_url: {url}\n")
    secret = f"{secrets.token_hex(32)}\n"
    for path in dict.fromkeys(places.at(reader, "server-secret") for reader in KNOW_SECRET):
        _put(path, secret)
    _put(users, "\n".join(["user default off", *lines, ""]))
    print(f"{users} for the server, and a --config for each role in {places.folder}")


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
