"""The text of a Lua script as Redis gets it: the parts of shared files that it uses, then its own.

    python -m penstock.schemas.redis.script jobs/enqueue

prints one, for a client that has nothing but Redis: `EVAL` it with one key, the lane's prefix.

Redis runs the whole text at each call, and each function that it defines takes time. So the shared
files are split into parts at their blank lines, and a part is sent where a name that it defines is
used. A script is named with its room: `jobs` are those of clients, `workers` those of workers,
`housekeeping` those of a lane's upkeep, `units` those that hand chores to gateways,
`storage` those of what tenants have stored.
"""

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"
SHARED_PARTS = ("lane", "accounts", "waiting", "log", "storage")  # sent in this order
DEFINITION = re.compile(r"^(?:local )?function (\w+)|^local ((?:\w+, )*\w+)", re.MULTILINE)
COMMENT_OR_TEXT = re.compile(r"--.*|'[^'\n]*'")


@cache
def script_text(name: str) -> tuple[str, str]:
    """Return the whole text of a script, and the digest by which Redis knows it."""
    own = (SCRIPTS / f"{name}.lua").read_text()
    names, parts = _names(own), set[str]()
    while more := {part for part in _parts() if part not in parts and _defines(part) & names}:
        parts |= more
        names.update(*map(_names, more))
    text = "\n\n".join([*(part for part in _parts() if part in parts), own])
    return text, hashlib.sha1(text.encode()).hexdigest()


@cache
def _parts() -> list[str]:
    return [
        part.strip("\n")
        for name in SHARED_PARTS
        for part in re.split(r"\n\n+", (SCRIPTS / "shared" / f"{name}.lua").read_text())
    ]


def _names(part: str) -> set[str]:
    return set(re.findall(r"\w+", COMMENT_OR_TEXT.sub("", part)))


def _defines(part: str) -> set[str]:
    matches = DEFINITION.findall(part)
    return {word for function, names in matches for word in (function, *names.split(", ")) if word}


if __name__ == "__main__":
    print(script_text(sys.argv[1])[0], end="")
