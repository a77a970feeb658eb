"""Notes by which commands find the Redis of a `penstock up` that runs on the same machine.

A note is a file in the user's home that its writer keeps locked while it runs. So a note that a
crash left behind has no effect.
"""

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("~/.penstock/up")
ANYWHERE = "redis://127.0.0.1:6379/0"  # where no `penstock up` runs


@contextmanager
def noted(url: str) -> Iterator[None]:
    """Let this user's commands on this machine find the URL meanwhile. Raises OSError."""
    if sys.platform == "win32":  # no `penstock up` there
        yield
        return
    import fcntl

    folder = FOLDER.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{socket.gethostname()}-{secrets.token_hex(8)}"
    draft, note = folder / f".{name}", folder / name
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, url.encode())
        fcntl.flock(handle, fcntl.LOCK_EX)
        draft.rename(note)  # never there without its lock
        yield
    finally:
        for path in (draft, note):
            path.unlink(missing_ok=True)
        os.close(handle)


def nearby() -> list[str]:
    """Return the URLs that are noted now, and remove notes that no process holds any more."""
    if sys.platform == "win32":
        return []
    import fcntl

    urls = []
    for note in sorted(FOLDER.expanduser().glob(f"{socket.gethostname()}-*")):
        with suppress(OSError), note.open() as text:  # gone by now, or another user's
            try:
                fcntl.flock(text, fcntl.LOCK_SH | fcntl.LOCK_NB)
                note.unlink()
            except BlockingIOError:
                urls.append(text.read())
    return urls
