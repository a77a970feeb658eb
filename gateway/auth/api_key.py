"""API keys, `psk_<id>_<secret>`, and the record of each, which says what it allows.

A record never holds the secret.
"""

import base64
import hmac
import re
import secrets
import time
from typing import Literal, Self

from pydantic import Field, JsonValue

from penstock.schemas.account import Account, Quota
from penstock.schemas.job import DEFAULT_TENANT, PriorityClass
from penstock.schemas.process.secret import sign
from penstock.schemas.wire.wire import Wire

Scope = Literal["inference", "jobs", "batches", "metrics", "admin"]

API_KEYS = "penstock:api_keys"  # hash: id -> JSON ApiKey; configuration, never expires
SECRET_MARK = "penstock:secret_mark"  # text: tells which server secret keys are checked with
KEY_ID = re.compile(r"[a-z2-7]{12}")
KEY = re.compile(r"psk_([a-z2-7]{12})_[a-z2-7]{52}")
MAX_CHARS = 256  # a longer text is no key, and is not hashed
DEFAULT_SCOPES: tuple[Scope, ...] = ("inference", "jobs", "batches")


class ApiKey(Wire):
    """The record of a key, stored by its id. A gateway too old to read it refuses the key."""

    key_id: str = Field(pattern=KEY_ID.pattern)
    digest: str = Field(description="HMAC-SHA256 of the whole key under the server secret, in hex")
    name: str = Field("", max_length=256, description="for people")
    tenant: str = Field(DEFAULT_TENANT, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    limits: Quota = Quota()
    max_priority: PriorityClass = Field("normal", description="what asks for more gets this class")
    created_s: int = 0
    expires_s: int | None = None
    revoked_s: int | None = None

    @classmethod
    def issue(
        cls, secret: bytes, record: dict[str, object], name: str | None = None
    ) -> tuple[str, Self]:
        """Make a new key, which is to be shown once, and its record. Return both.

        Under the same server secret and name, which is else drawn, it is the same key.
        """
        name = name or secrets.token_hex(20)
        key_id, rest = (
            _letters(sign(secret, "key_id", name))[:12],
            _letters(sign(secret, "key", name)),
        )
        text = f"psk_{key_id}_{rest}"
        fields = record | {"key_id": key_id, "digest": digest_of(secret, text)}
        return text, cls.model_validate(fields)

    @property
    def account(self) -> Account:
        """Return the account that the key's jobs count for. No tenant has a name like it."""
        return Account(name=f"{self.tenant}/{self.key_id}", limits=self.limits)

    def has_ended(self, now_s: float) -> bool:
        return self.revoked_s is not None or (self.expires_s or float("inf")) <= now_s

    def state(self, now_s: float) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_s is not None:
            return "revoked"
        return "expired" if self.has_ended(now_s) else "valid"

    def shown(self) -> dict[str, JsonValue]:
        """Return what may be shown of the record, and its state by this machine's clock."""
        fields: dict[str, JsonValue] = self.model_dump(mode="json", exclude={"digest"})
        return fields | {"state": self.state(time.time())}

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


def digest_of(secret: bytes, key: str) -> str:
    return sign(secret, "api_key", key).hex()


def is_right(secret: bytes, key: str, record: ApiKey | None) -> bool:
    """Return whether this is the record's key. An unknown key costs the same work as a known."""
    expected = record.digest if record else "0" * 64
    matches = hmac.compare_digest(digest_of(secret, key), expected)
    return matches and record is not None


def _letters(digest: bytes) -> str:
    return base64.b32encode(digest).decode().lower().rstrip("=")
