"""`penstock acl`: prints users of Redis, one per role, each allowed what it needs and no more.

The lines go into the server's `aclfile`, or after `ACL SETUSER` without their first word.
"""

import hashlib
import re
import secrets
import sys
from dataclasses import dataclass

from pydantic import Field

from penstock.schemas.keys import MODELS, NAMESPACE
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.script import SCRIPTS

CALL = re.compile(r"(?:redis\.p?call\(|\{)\s*'([A-Z]{2,})'")  # also in a table that is unpacked
LANES = f"{NAMESPACE}:{{*:*}}:*"  # every key and channel of every lane
EVERYBODY = "auth hello ping echo select eval evalsha info role cluster|slots pubsub|numsub"
HEARS = "subscribe unsubscribe"


@dataclass(frozen=True, slots=True)
class Role:
    """The keys, channels and commands that a user of Redis may use.

    `keys` and `channels` are patterns. `commands` are allowed besides those that scripts call.
    """

    name: str
    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: str


ROLES = (
    Role(
        "gateway",
        (f"{NAMESPACE}:*",),
        (LANES,),
        f"{HEARS} xread hvals hgetall mget exists zrevrange hsetnx hdel",
    ),
    Role("worker", (LANES, MODELS), (LANES,), f"{HEARS} xread hvals"),
    Role("client", (LANES, MODELS), (LANES,), f"{HEARS} hvals"),
    Role(
        "housekeeping",
        (f"{NAMESPACE}:*", "arq:*"),
        (LANES,),
        f"{HEARS} @read @write @transaction @string @hash @set @sortedset @stream -@dangerous info",
    ),
    Role(
        "operator",
        (f"{NAMESPACE}:*", "arq:*"),
        (LANES,),
        f"{HEARS} @read @write @keyspace -flushall -flushdb -@admin client|list slowlog|get",
    ),
)


class AclSettings(Settings):
    """Print the ACL lines of every role, with new passwords; the passwords go to stderr."""

    fsync: bool = Field(False, description="for durability=fsync: WAITAOF, which old servers lack")


def script_commands() -> list[str]:
    """Return the commands that scripts call. A script runs with the rights of its caller."""
    texts = (path.read_text() for path in SCRIPTS.rglob("*.lua"))
    return sorted({name.lower() for text in texts for name in CALL.findall(text)})


def line(role: Role, password: str, has_waitaof: bool) -> str:
    """Return the role's line of an `aclfile`. What it does not name is forbidden."""
    words = f"{EVERYBODY} {role.commands}".split() + (["waitaof"] if has_waitaof else [])
    needed = [word for word in script_commands() if word not in ("publish", "pubsub")]
    commands = [word if word[0] in "+-" else f"+{word}" for word in [*needed, "publish", *words]]
    return " ".join(
        [
            f"user {role.name} reset resetchannels on",  # Redis 6.2 allows all channels by default
            f"#{hashlib.sha256(password.encode()).hexdigest()}",
            *(f"~{pattern}" for pattern in role.keys),
            *(f"&{pattern}" for pattern in role.channels),
            "-@all",
            *commands,
        ]
    )


def main(argv: list[str]) -> int:
    settings = load_settings(AclSettings, "penstock acl", argv)
    for role in ROLES:
        password = secrets.token_urlsafe(24)
        print(line(role, password, settings.fsync))
        print(f"redis://{role.name}:{password}@...", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
