"""The text of a Lua script as Redis gets it: the shared files that it needs, then its own.

    python -m schemas.script enqueue

prints one, for a client that has nothing but Redis: `EVAL` it with one key, the lane's prefix.
Which shared files a script needs its first line says: `-- with lane, accounts, waiting`.
"""

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
SHARED = ("lane", "accounts", "waiting", "log")  # in the order in which they are sent


@cache
def script_text(name: str) -> tuple[str, str]:
    """A script whole, and the digest by which Redis knows it."""
    own = (SCRIPTS / f"{name}.lua").read_text()
    head = re.match(r"-- with ([a-z, ]+)\n", own)
    needed = head[1].split(", ") if head else []
    parts = [(SCRIPTS / f"{part}.lua").read_text() for part in SHARED if part in needed]
    text = "".join([*parts, own])
    return text, hashlib.sha1(text.encode()).hexdigest()


if __name__ == "__main__":
    print(script_text(sys.argv[1])[0], end="")
