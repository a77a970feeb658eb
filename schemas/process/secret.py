"""The server secret, against which API keys, share tokens and the like are checked."""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

DEFAULT_FILE = Path("~/.penstock/secret")
MIN_CHARS = 32


class BadSecret(ValueError):
    """Raised when the secret is too short or its file is unsafe; the message says what to do."""


def read_secret(setting: str | None, file: Path) -> bytes | None:
    """Return `setting`, else what the file holds, or None without either. Raises BadSecret."""
    path = file.expanduser()
    if setting is None:
        try:
            if path.stat().st_mode & 0o077:
                raise BadSecret(f"{path}: others may read the server secret; chmod 600 {path}")
            setting = path.read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadSecret(f"{path}: cannot be read: {error.strerror}") from None
    secret = setting.strip()
    if len(secret) < MIN_CHARS:
        raise BadSecret(f"the server secret has {len(secret)} characters; give {MIN_CHARS} or more")
    return secret.encode()


def make_secret(setting: str | None, file: Path) -> bytes:
    """Return what `read_secret` does, or make a new secret in a new file of mode 0600.

    Of several processes that do this at once the first wins. Raises BadSecret, OSError.
    """
    if (secret := read_secret(setting, file)) is not None:
        return secret
    path = file.expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as output:
            output.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it never replaces another's
    finally:
        draft.unlink()
    secret = read_secret(None, file)
    assert secret is not None
    return secret


def mark_of(secret: bytes) -> str:
    """Return a short mark that tells two secrets apart, and tells too little to find one."""
    return sign(secret, "mark").hex()[:8]


def sign(secret: bytes, purpose: str, *words: str) -> bytes:
    """Return the HMAC-SHA256 of `words`, of no use for any other purpose or other words."""
    text = "".join(f"{len(word)}:{word}" for word in (purpose, *words))
    return hmac.digest(secret, text.encode(errors="replace"), hashlib.sha256)
